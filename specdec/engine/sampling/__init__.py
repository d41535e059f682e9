"""From logits to tokens: processors, noise, pruned search for the best, rejection."""
