"""Drafting text: the draft has its own tokens, and what passes between it and the target is tokenized anew."""
