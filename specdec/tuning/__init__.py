"""What to set for a pair on a machine: measuring steps and acceptance, predicting speed, and saying why."""
