"""The worker: leases shards of the data, pulls the rows of each batch, computes gradients and pushes them.

* `runtime`: a worker's life; `tasks`, `leases`, `messages`: its work, as the master gives it and hears of it.
* `pipeline`, `channel`: the stages that a batch goes through, each a thread.
* `keys`, `routes`: which key to ask which server for; `core`, `servers`: the exchange with all servers, pure and real.
* `compute`, `rows`: the model's gradients, and embeddings from and to rows.
* `rounds`, `local_rows`, `turns`: several batches on rows that are pulled once; `trial`, `pace`: whether that pays off.
* `statistics`: what the master and Prometheus are told.
"""
