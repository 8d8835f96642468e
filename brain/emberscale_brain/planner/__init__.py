"""Plans: what each job of a cluster should have, and why.

* `types`: what a planner is given and answers.
* `grid`, `front`, `sieve`: a job's shapes, and those of them that nothing beats.
* `job_model`, `candidates`: what is known of a job, and what each candidate shape brings.
* `selection`: one candidate a job, under capacity and quotas.
* `running`, `waiting`, `room`: jobs that run, jobs that do not run yet, and what is left for them.
* `default`: the planner made of all that; `explain` puts its decisions into words.
"""
