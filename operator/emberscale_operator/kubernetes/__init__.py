"""TrainingJobs on a Kubernetes cluster: pods under the same reconciler as processes.

Pure: `settings`, `names`, `pod_spec`, `objects`, `pod_state`, `demand`, `record`, `status`. Edges: `client`, `recorder`,
`master_link`, `controller`, `lease`, `health`, `operator`.
"""
