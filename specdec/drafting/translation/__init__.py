"""Drafting with another tokenizer than the target's, token by token: shared tokens and translation of ids."""
