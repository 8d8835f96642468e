"""Plans: what each job of a cluster should have, and why."""
