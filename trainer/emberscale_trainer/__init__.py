"""What trains: parameter servers, workers, models, data and checkpoints."""
