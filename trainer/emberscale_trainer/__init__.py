"""Parameter servers and workers.

* `server`, `worker`: the two kinds of processes; `hot`: the rows that data accesses most.
* `table`, `models`, `data`: embedding tables, models and batches; `jit`: the tools of their compiled kernels.
* `checkpoint`, `parity`, `stream`: rows in files, parity to rebuild rows from, and rows on their way to other servers.
* `membership`, `process`: a process as a member of its job, and how it starts and ends.
* `partition`: a server's share of the parameters, and the batches applied to it; `transport`: frames over sockets.
* `start`, `fork_server`: two ways to start a process; `compile_kernels`: fills Numba's cache before the first job.
"""
