import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emberscale_trainer.table import compiled, warm_up
from emberscale_trainer.table.compiled import digest_of_sources


def test_a_second_process_loads_the_kernels_instead_of_compiling_them() -> None:
    warm_up()
    program = """
from emberscale_trainer.table import kernels, warm_up
warm_up()
for kernel in (kernels.pull, kernels.push, kernels.load):
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == ["1 0"] * 3


class SlowKernel:
    """A kernel like Numba's dispatchers: once disabled, `compile` raises even for a compiled signature."""

    def __init__(self) -> None:
        self.signatures: list[object] = []
        self.began, self.may_end = threading.Event(), threading.Event()
        self.disabled = False

    def compile(self, signature: object) -> None:
        self.began.set()
        assert self.may_end.wait(60)
        if self.disabled:
            raise RuntimeError("compilation disabled")
        self.signatures.append(signature)

    def disable_compile(self) -> None:
        self.disabled = True


def test_threads_that_warm_up_at_once_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SlowKernel()
    monkeypatch.setattr(compiled, "_ENTRIES", [(kernel, "int64()")])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(warm_up)
        assert kernel.began.wait(60)
        second = pool.submit(warm_up)
        kernel.may_end.set()
        first.result(60)
        second.result(60)
    assert kernel.signatures == ["int64()"]


@pytest.mark.parametrize("change", ["content", "new file", "name"])
def test_a_change_of_any_source_makes_cached_kernels_stale(tmp_path: Path, change: str) -> None:
    (tmp_path / "kernels.py").write_text("1")
    (tmp_path / "index.py").write_text("2")
    before = digest_of_sources(tmp_path)
    assert digest_of_sources(tmp_path) == before
    if change == "content":
        (tmp_path / "index.py").write_text("3")
    elif change == "new file":
        (tmp_path / "rows.py").write_text("")
    else:
        (tmp_path / "index.py").rename(tmp_path / "inde.py")
    assert digest_of_sources(tmp_path) != before
