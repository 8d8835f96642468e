"""The worker: leases shards of the data, pulls the rows of each batch, computes gradients and pushes them.

* `runtime`: the life cycle of a worker; `tasks`, `leases`, `messages`: work from the master, and reports to it.
* `pipeline`, `channel`: the stages that a batch goes through, each a thread.
* `keys`, `routes`: the server of each key; `core`, `servers`: the exchange with all servers, pure and real.
* `compute`, `rows`: the model's gradients, and the conversion between embeddings and rows.
* `rounds`, `local_rows`, `turns`: several batches on rows that are pulled once; `trial`, `pace`: whether that pays off.
* `statistics`: figures for the master and Prometheus.
"""
