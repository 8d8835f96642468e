"""The data side of training: files, blocks, the order of an epoch, batches, and synthetic data."""
