"""The throughput model: how a job's speed depends on its shape, learned from its profiles."""
