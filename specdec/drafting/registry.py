"""All drafters without weights by name: what each can do, and how one is made from its options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdec.config.drafter_options import (
    LookaheadOptions,
    NgramOptions,
    PlainOptions,
    PredictionOptions,
    SuffixOptions,
)
from specdec.drafting.interface import Capabilities, Drafter
from specdec.drafting.lookup import lookahead, ngram, prediction, suffix

CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType(
    {
        "ngram": ngram.CAPABILITIES,
        "suffix": suffix.CAPABILITIES,
        "prediction": prediction.CAPABILITIES,
        "lookahead": lookahead.CAPABILITIES,
    }
)
"""Of every one that there is; heads are in `specdec.drafting.heads.methods.registry`."""
DRAFT_MODEL_CAPABILITIES = Capabilities(
    is_serial=True, gives_distribution=True, places=frozenset({"target", "draft_service"})
)
"""Of `draft_model`, with the target's tokenizer; a drafter's part of it is `specdec.drafting.role`."""


def make_drafter(options: PlainOptions) -> Drafter:
    """The drafter that these options describe."""
    match options:
        case NgramOptions():
            return ngram.Ngram(options)
        case SuffixOptions():
            return suffix.Suffix(options)
        case PredictionOptions():
            return prediction.Prediction(options)
        case LookaheadOptions():
            return lookahead.Lookahead(options)
