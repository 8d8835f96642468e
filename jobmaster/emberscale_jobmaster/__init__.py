"""The job master: one per job, owner of the job's run-time state.

`machine.step(state, event, spec) -> (state, effects)` makes every decision. It uses no clock, thread or network; its
inputs are `events` and its outputs `effects`. Its parts, each pure:

* `state` is what must survive the master, `observations` what may be forgotten with it.
* `progress`, `tasks`, `lifecycle`, `scaling` and `reshaping` are transitions: stages, leases, members, plans.
* `restoring`, `checkpointing` and `moving` are durable `operations` on the parameter servers, with deadlines; `retry`
  is their retry policy, and `transitions` says which of their phases may follow which. `barrier` makes all servers
  agree, `recovery` chooses how a job recovers.
* `ledger`, `membership`, `placement`, `ranges`, `sizes`, `statistics` are what these are made of.

Around it: `runtime` (one lock; no effect is carried out before the state is in `store`, which is Redis), `service`
(gRPC), `conductor` with `parameter_servers` and `storage` (carry out effects), `brain_link`, and `server`, which
assembles them.
"""
