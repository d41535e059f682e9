"""How the pair in this folder was trained: corpus, tokenizer, shapes, loop, evaluation."""
