"""The simulator: schedulers against each other on clusters that are only computed.

* `scenario`, `scenario_file`, `trace`: what a file says, and how it is read.
* `workload`, `job`, `ground_truth`: the jobs that arrive, and what they really cost.
* `mechanics`: what the system under a scheduler can do, with the source of each number.
* `run`, `pods`, `recovery`, `resources`, `profiler`: one job's life; `engine`: all jobs on one cluster.
* `adviser`: the brain's advice on how often jobs save.
* `schedulers`: the algorithms that are compared, any planner of the brain among them.
* `experiment`, `results`, `pictures`: many seeds, and their results.

It imports the brain's planners and nothing of the brain's service, which does not know it.
"""
