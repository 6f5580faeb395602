"""One training run: settings, batches, objectives, optimizer, checkpoints, records."""
