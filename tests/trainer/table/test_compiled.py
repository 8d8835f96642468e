import subprocess
import sys
from pathlib import Path

import pytest

from emberscale_trainer.table import warm_up
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
