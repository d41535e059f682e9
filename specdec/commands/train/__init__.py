"""`specdec train`: trains a draft or a head for a target on the target's continuations of your prompts."""
