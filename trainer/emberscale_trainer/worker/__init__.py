"""The worker: leases shards of the data, pulls the rows of each batch, computes gradients and pushes them."""
