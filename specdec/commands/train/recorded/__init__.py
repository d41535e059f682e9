"""What a run computes once and keeps in its folder: texts, the target's hidden states, and its probabilities."""
