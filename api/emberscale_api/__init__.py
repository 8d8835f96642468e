"""The contracts between Emberscale's components: shared types, protocols and names, without behaviour.

* `job`: the TrainingJob manifest as types.
* `rpc`: the control plane: protos, stubs, and how a call proves that it belongs to the job.
* `wire`: the data plane between workers and parameter servers.
* `dataset`: the files of a job's data, and the index of their records.
* `shape`: numbers and sizes of a job's processes, and what was measured with them.
* `routing`: which parameter server owns which key.
* `checkpoint`, `origin`: the manifest of a checkpoint, and starting from another job's.
* `environment`, `certificates`, `compatibility`, `fork_server`: the inputs of processes, and their agreements.
* `start`: what a process does before it imports what it needs.
* `readable`: durations, sizes, rates, shares and counts as people read them.
* `errors`, `frozen`, `pictures`: errors that people read, changed copies of states, the look of pictures.
* `metrics`: names of the Prometheus metrics.
* `metrics_server`: serves them over HTTP, with few threads.
* `telemetry`: structured logs, and metrics of every process.
"""
