"""What the objects of an artifact mean: hyperparameters and named weight views of one model. No arithmetic."""
