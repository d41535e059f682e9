"""All ways of drafting.

role/         a draft model, in a draft service or inside a target lookup/       drafters without weights: n-grams,
suffixes, predictions, lookahead heads/        heads over the target's hidden states: Medusa, EAGLE and others
layer_skip/   the target itself with some layers skipped endpoints/    a draft behind an OpenAI-compatible API
translation/  a draft with another tokenizer, token by token text/         a draft with another tokenizer, by text

`interface.py` defines drafters; `registry.py` lists the ones that run inside a target.
"""
