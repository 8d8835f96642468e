"""For `slow_members.py` only: makes the master find no member slow, and size shards as if all workers were alike.

Python imports this module at its start if PYTHONPATH names the folder.
"""

import math
import sys

if "emberscale_jobmaster" in sys.orig_argv:
    from emberscale_jobmaster import slowness
    from emberscale_jobmaster.observations import Observations

    slowness.SLOW_FACTOR = math.inf
    Observations.speed = lambda self, slot: None  # type: ignore[method-assign]  # so that all count as the median
