"""TrainingJobs on a Kubernetes cluster: pods under the same reconciler as processes.

Pure: `settings`, `names`, `job`, `pod_spec`, `pod_state`, `demands`, `record`, `status`. Edges: `client`, `recorder`,
`master_link`, `decision`, `actuator`, `controller`, `fleet`, `lease`, `health`, `operator`.
"""
