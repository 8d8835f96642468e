"""A job on this machine: processes for pods, under the same job machine.

* `runner`: the run as a whole; `backend`: its processes as a backend of the job machine; `snapshot`: their reports.
* `processes`, `process`, `starters`, `tether`, `cpu`: starting, watching and ending processes, and their cores.
* `folder`, `environment`, `port`: files, variables and ports of a run.
* `edits`, `requests`: what other commands ask of a run: edits of its manifest, and kills.
* `embedded_redis`, `brain`: the store and the brain of a run.
"""
