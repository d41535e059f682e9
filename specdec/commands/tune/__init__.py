"""`specdec tune`: measures a pair of models, predicts its speed, and advises on settings."""
