"""The worker: leases shards of the data, pulls what a batch needs, computes gradients, pushes them."""
