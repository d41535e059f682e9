"""`specdec train`: makes a draft or a head for a target, from the target's continuations of your prompts."""
