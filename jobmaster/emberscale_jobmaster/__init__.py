"""The job master: one a job, owner of the job's run-time truth.

`machine.step(state, event, spec) -> (state, effects)` is the whole of its decisions. It knows neither clock, thread nor
network; `events` and `effects` are all that it is told and asks for. Its parts, each pure:

* `state` is what must survive the master, `observations` what may be forgotten with it.
* `progress`, `tasks`, `lifecycle` and `scaling` are transitions: stages, leases, members, plans.
* `restoring` and `checkpointing` are what the master does to parameter servers over some time: durable `operations`,
  with deadlines, tried again by `retry`. `barrier` is how all servers come to agree, `recovery` chooses the way back.
* `ledger`, `membership`, `evaluation`, `applied`, `ranges`, `sizes`, `statistics` are what these are made of.

Around it: `runtime` (one lock; nothing is done before the state is in `store`, which is Redis), `service` (gRPC),
`conductor` with `parameter_servers` and `storage` (carry out effects), `brain_link`, `metrics`, and `server`, which
puts them together.
"""
