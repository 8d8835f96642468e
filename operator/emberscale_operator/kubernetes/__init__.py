"""TrainingJobs on a Kubernetes cluster: pods under the same job machine as processes.

Pure: `settings`, `names`, `job`, `pod_spec`, `pod_state`, `quantities`, `record`, `status`. Edges: `client`,
`creation`, `tenants`, `recorder`, `observation`, `actuator`, `backend`, `fleet`, `census`, `lease`, `health`,
`operator`.
"""
