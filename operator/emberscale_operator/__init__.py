"""Makes what runs equal to what a job needs.

* `machine`: the decision, pure: intent, standing, the master's report and observed instances in, actions out.
* `master_link`: the conversation with a job's master; `master_bounds` bounds what it tells.
* `controller`: one job's loop over a backend: observe, decide, report, act.
* `kubernetes`: the backend of pods, and the operator around it.
* `local`: the backend of processes on this machine.
"""
