"""Drafting with another tokenizer, by text: tokens of one side are tokenized anew for the other."""
