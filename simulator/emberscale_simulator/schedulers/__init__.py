"""The schedulers to compare: the published baselines, and any planner."""
