"""The brain: learns how each job's throughput depends on its shape, and plans for all jobs of a cluster together.

* `history`: the database; `model`: the throughput model; `planner`: plans from both; `service`: the brain as a process.
* `warm_start`, `memory`, `fault_tolerance`: a job's first shape, its servers' memory, and how it should recover.
* `preferences`: the planner and its settings, which the simulator reads too.
"""
