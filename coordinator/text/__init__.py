"""Text and tokens: the tokenizer, incremental detokenizing, stop strings, and one choice's output. Pure: no network."""
