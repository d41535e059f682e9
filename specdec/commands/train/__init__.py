"""Making drafters for a target: its continuations, its hidden states, and what learns from them."""
