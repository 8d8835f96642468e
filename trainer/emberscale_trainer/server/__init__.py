"""The parameter server: stores rows and pieces of the dense vector, and applies each batch once.

Pure, decisions without rows or threads:

* `core`: requests and control calls, made of `fencing` (leases), `staleness`, `barrier`, `moves`, `adoption` (of lost
  servers' rows), and `pressure` (pushes when memory is short).
* `group`: the parity of other servers' rows; `lag`: the pushes that the parity of this server's rows still lacks.
* `missing`: rows of a lost server that are served and have yet to be rebuilt.

Around it:

* `state`: the lock under which `core` decides, and the calls that carry its decisions out; `reports` is what it tells.
* `served`: the rows of `state`, and all that follows a change of them.
* `arriving`: rows that a move brings to `state`; `waiting`: requests that wait for a change of it.
* `dataplane`: requests of workers; `control`: calls of the master, whose long ones go on in the `background`.
* `saves`: checkpoints of the rows, written in the background.
* `mover`, `rebuild`: rows go to other servers, both by `sending`; `retiring`: what was given away leaves the tables.
* `protection`, `parity_group`: threads and streams around `group`; `parity_items`: what they send and take.
* `withdrawing`: rows leave the parity so that lost ones are left in it, first those that a `demand` of their new owner
  is for.
* `eviction`: rows leave the tables between batches; `metrics`: Prometheus.
"""
