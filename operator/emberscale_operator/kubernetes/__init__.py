"""TrainingJobs on a Kubernetes cluster: pods under the same job machine as processes.

Pure: `settings`, `names`, `job`, `pod_spec`, `pod_state`, `spreading`, `manifest_size`, `allowance`, `record`,
`status`.
Edges: `client`, `creation`, `certificate`, `roster`, `tenants`, `flash_tenants`, `claims`, `disruption`, `events`,
`pod_warnings`, `stories`, `observation`, `actuator`, `status_writer`, `backend`, `fleet`, `census`, `namespaces`,
`lease`, `health`, `operator`.
"""
