"""Plans: what each job of a cluster should have, and why.

* `types`: the inputs and outputs of a planner.
* `grid`, `front`, `sieve`: a job's shapes, and its Pareto front.
* `job_model`, `candidates`: the knowledge of a job, and the costs and gains of each candidate shape.
* `selection`: one candidate per job, under capacity and quotas.
* `running`, `waiting`, `room`: jobs that run, jobs that do not run yet, and the room left for them.
* `default`: the planner made of all these; `explain` puts its decisions into words.
"""
