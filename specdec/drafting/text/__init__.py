"""Drafting with another tokenizer, by text: each side tokenizes the other's text again."""
