"""TrainingJobs on a Kubernetes cluster: pods under the same job machine as processes.

Pure: `settings`, `names`, `job`, `pod_spec`, `pod_state`, `manifest_size`, `record`, `status`. Edges: `client`,
`creation`, `tenants`, `events`, `observation`, `actuator`, `backend`, `fleet`, `census`, `lease`, `health`,
`operator`.
"""
