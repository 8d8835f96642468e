"""A job on this machine: processes for pods, under the same job machine.

* `runner`: the run as a whole; `backend`: its processes as a backend of the job machine; `snapshot`: their reports.
* `processes`, `process`, `starters`, `tether`, `cpu`: starting, watching and ending processes, and their cores.
* `folder`, `environment`, `port`: files, variables and ports of a run; `requests`: requests of other commands to it.
* `embedded_redis`, `brain`: the store and the brain of a run.
"""
