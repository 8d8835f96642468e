"""Resources as people write them."""

from emberscale_operator.machine import Resources

_MIB = 1 << 20


def quantity(memory_bytes: int) -> str:
    """Bytes as people write them: `1536Mi`."""
    return f"{memory_bytes // _MIB}Mi" if memory_bytes % _MIB == 0 else str(memory_bytes)


def quantities(resources: Resources) -> tuple[str, str]:
    """Cores and memory as people write them: `1.5`, `1536Mi`; empty where there is no limit."""
    cpu, memory = resources.cpu_cores, resources.memory_bytes
    return "" if cpu is None else f"{cpu:g}", "" if memory is None else quantity(memory)
