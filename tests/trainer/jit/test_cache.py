import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from emberscale_trainer import jit
from emberscale_trainer.jit import digest_of_sources, kernel, warm_up


def printed(program: str, **options: Any) -> list[str]:
    command = [sys.executable, "-c", program]
    output: str = subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout
    return output.splitlines()


def test_a_second_process_loads_the_kernels_instead_of_compiling_them() -> None:
    program = """
from emberscale_trainer.jit import warm_up
from emberscale_trainer.table import kernels
warm_up()
for kernel in (kernels.pull, kernels.push, kernels.load):
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""
    printed(program)
    assert printed(program) == ["1 0"] * 3


def test_what_is_forked_has_the_kernels_loaded() -> None:
    """The server ends at once, as nobody is at the other end of its connection."""
    program = """
import os, socket
ours, theirs = socket.socketpair()
ours.close()
os.dup2(theirs.fileno(), 0)
from emberscale_trainer.fork_server import main
main()
from emberscale_trainer.table import kernels
print(*(len(kernel.signatures) for kernel in (kernels.pull, kernels.push, kernels.load)))
"""
    assert printed(program) == ["1 1 1"]


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
    slow = SlowKernel()
    monkeypatch.setattr(jit, "_ENTRIES", [(slow, "int64()")])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(warm_up)
        assert slow.began.wait(60)
        second = pool.submit(warm_up)
        slow.may_end.set()
        first.result(60)
        second.result(60)
    assert slow.signatures == ["int64()"]


def test_a_kernel_whose_cache_has_no_place_is_compiled_all_the_same() -> None:
    namespace: dict[str, Any] = {}
    exec("def twice(number):\n    return 2 * number\n", namespace)  # from no file, so its kernel cannot be cached
    assert kernel(namespace["twice"])(21) == 42


KERNELS = """
from emberscale_trainer.jit import entry, kernel, typed_kernel, warm_up
from parts import step

@entry
def an_entry(number):
    return step(number)

@kernel
def a_kernel(number):
    return step(number)

@typed_kernel("i8(i8)")
def a_typed_kernel(number):
    return step(number)

warm_up()
for kernel in (an_entry, a_kernel, a_typed_kernel):
    print(kernel(1), sum(kernel.stats.cache_hits.values()))
"""
PART = """
from emberscale_trainer.jit import part

@part
def step(number):
    return number + {summand}
"""


def test_a_kernel_is_compiled_again_when_a_part_in_another_file_has_changed(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for summand, hits in ((1, 0), (1, 1), (2, 0)):
        (tmp_path / "parts.py").write_text(PART.format(summand=summand))
        assert printed("import kernels", cwd=tmp_path, env=environment) == [f"{1 + summand} {hits}"] * 3


@pytest.mark.parametrize("change", ["content", "new file", "name"])
def test_a_change_of_any_source_changes_their_digest(tmp_path: Path, change: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        (folder / "kernels.py").write_text("1")
        (folder / "index.py").write_text("2")
    digest_of_sources.cache_clear()
    assert digest_of_sources(before) == digest_of_sources(after)
    digest_of_sources.cache_clear()
    if change == "content":
        (after / "index.py").write_text("3")
    elif change == "new file":
        (after / "rows.py").write_text("")
    else:
        (after / "index.py").rename(after / "inde.py")
    assert digest_of_sources(before) != digest_of_sources(after)
