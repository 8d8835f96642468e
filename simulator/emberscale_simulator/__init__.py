"""The simulator: compares schedulers on simulated clusters.

* `scenario`, `scenario_file`, `trace`: the contents of input files, and how they are read.
* `workload`, `job`, `ground_truth`: the jobs that arrive, and their true costs.
* `mechanics`: the abilities of the system under a scheduler, with the source of each number.
* `run`, `pods`, `recovery`, `resources`, `profiler`: one job's life; `engine`: all jobs on one cluster.
* `adviser`: the brain's advice on how often jobs save.
* `schedulers`: the algorithms to compare, including any planner of the brain.
* `experiment`, `results`, `pictures`: many seeds, and their results.

It imports the brain's planners, but nothing of the brain's service, which does not depend on it either.
"""
