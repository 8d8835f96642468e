"""Simulated jobs: the cores of master, servers, workers and operator on one seeded clock and network."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).parents[1] / "support")
if _SUPPORT not in sys.path:  # pytest adds it; `python -m tests.simulation` has to do so itself
    sys.path.append(_SUPPORT)
