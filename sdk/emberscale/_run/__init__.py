"""A run's folder, record, checks before it starts, interruption, resumption, audit and summary."""
