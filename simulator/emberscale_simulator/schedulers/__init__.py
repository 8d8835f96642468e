"""The schedulers that are compared: the published baselines, and any planner."""
