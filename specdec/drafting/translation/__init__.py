"""A draft whose tokenizer is not the target's: which tokens both have, and what passes between their ids."""
