"""The brain: learns how each job's throughput depends on its shape, and plans for all jobs of a cluster together."""
