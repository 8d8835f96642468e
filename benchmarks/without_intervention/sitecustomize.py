"""For `slow_members.py` alone: a master that finds no member slow, and sizes shards as if all workers were alike.

Python imports this at its start where PYTHONPATH names the folder.
"""

import math
import sys

if "emberscale_jobmaster" in sys.orig_argv:
    from emberscale_jobmaster import slowness
    from emberscale_jobmaster.observations import Observations

    slowness.SLOW_FACTOR = math.inf
    Observations.speed = lambda self, slot: None  # type: ignore[method-assign]  # so that all count as the median
