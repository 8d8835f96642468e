"""The brain as a service: profiles in, plans out.

* `state`, `checks`, `acceptance`, `in_force`, `first_plan`, `learning`: what the brain knows and decides.
* `runtime`: the owner of lock and state.
* `planning`, `planning_process`, `frames`, `rounds`: planning in a process of its own.
* `recorder`: writing to the database behind the answers.
* `messages`, `callers`, `server`: gRPC; `brain`, `command`, `settings`, `meters`, `clock`: the process.
"""
