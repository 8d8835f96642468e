"""The job master: one a job, owner of the job's run-time truth.

The pure core knows neither clock nor network. Its parts are `ranges`, `applied`, `ledger`, `shard_sizing`,
`membership`, `evaluation` and `auc`; `state` is the durable whole, changed by the transitions in `progress`, `tasks`
and `lifecycle`; `observations` and `statistics` are what may be forgotten. Around it: `store` (Redis), `runtime` (one
lock, durable before any reply), `service` (gRPC), `conductor` and `cut` (drive the parameter servers), `checkpoints`
(any fsspec URI).
"""
