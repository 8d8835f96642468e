"""Parameter servers, workers, models, data and checkpoints."""
