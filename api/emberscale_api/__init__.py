"""The contracts between Emberscale's components: shared types, protocols and names, without behaviour.

`job`        the TrainingJob manifest as types
`rpc`        the control plane: protos, stubs, and how a call proves that it belongs to the job
`wire`       the data plane between workers and parameter servers
`dataset`    the files of a job's data, and the index of their records
`routing`    which parameter server owns which key
`metrics`    names of the Prometheus metrics
`telemetry`  structured logs, and metrics of every process
"""
