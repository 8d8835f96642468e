"""The brain as a service: profiles in, plans out.

* `state`, `checks`, `acceptance`, `in_force`, `first_plan`, `learning`: the brain's knowledge and its decisions.
* `runtime`: the owner of lock and state.
* `planning`, `planning_process`, `frames`, `rounds`: planning in a separate process.
* `recorder`: writing to the database in the background.
* `requests`, `answers`, `server`: gRPC; `brain`, `settings`, `instruments`: what the process holds.
"""
