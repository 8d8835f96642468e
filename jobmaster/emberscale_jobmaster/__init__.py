"""The job master: one per job, owner of the job's run-time state.

`machine.step(state, event, spec) -> (state, effects)` makes every decision. It uses no clock, thread or network; its
inputs are `events` and its outputs `effects`. Its parts, each pure:

* `state`, from which `figures` follow, must survive the master; `observations`, made of the `reports` of members, may
  be lost with it.
* `progress`, `tasks`, `lifecycle`, `takeover`, `scaling` and `reshaping` are transitions: stages, leases, members, a
  new master, plans.
* `restoring`, `reloading`, `checkpointing` and `moving` are durable `operations` on the parameter servers, with
  deadlines. `dispatch` hands them answers and failures, `retry` is their retry policy, and `transitions` says which of
  their phases may follow which. `barrier` makes all servers agree.
* `losses` and `recovery` choose how a job recovers, `parity` decides whether servers keep it, `rebuilding` rebuilds
  from it by a move, and `forgetting` counts what a partial recovery loses.
* `draining`, `relief`, `stragglers` and `slowness` deal with servers that go and members that are slow.
* `due_checkpoints` decides when a checkpoint begins, and which one, by `flash`, `priority`, `chains` and
  `quantization`.
* `status`, `profiling` and `warning_signs` report to people, the operator and the brain.
* `ledger`, `membership`, `placement`, `ranges`, `sizes` and `statistics` are the building blocks.

Around it: `runtime` (one lock; no effect is carried out before the state is in `store`, which is Redis), `service`
(gRPC, by `messages`), `conductor` with `parameter_servers` and `storage` (carry out effects; `checkpoints`,
`flash_manifests` and `initial` are the folders and Redis that they use), `brain_link` (by `brain_messages`), and
`server`, which assembles them.
"""
