"""What a checkpoint is, before anything runs: its files, the format of its weights, and rounding these."""
