"""All ways of drafting.

role/         drafting with a model: the role of a draft service, and of a target with a draft of its own
lookup/       drafters without weights: n-grams, suffixes, predictions, lookahead
heads/        heads over the target's hidden states: Medusa, EAGLE and others
layer_skip/   the target's own layers, some of them left out
endpoints/    a draft behind an OpenAI-compatible API
translation/  a draft with another tokenizer, token by token
text/         a draft with another tokenizer, by text

`interface.py` says what a drafter is; `registry.py` lists those that a target asks itself.
"""
