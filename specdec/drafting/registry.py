"""All drafters without weights by name: their capabilities, and how to make one."""

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
"""Capabilities by method; those of heads are in `specdec.drafting.heads.methods.registry`."""
DRAFT_MODEL_CAPABILITIES = Capabilities(
    is_serial=True, gives_distribution=True, places=frozenset({"target", "draft_service"})
)
"""Capabilities of `draft_model` (`specdec.drafting.role`) with the target's tokenizer."""


def make_drafter(options: PlainOptions) -> Drafter:
    """Make the drafter of these options."""
    match options:
        case NgramOptions():
            return ngram.Ngram(options)
        case SuffixOptions():
            return suffix.Suffix(options)
        case PredictionOptions():
            return prediction.PredictionDrafter(options)
        case LookaheadOptions():
            return lookahead.Lookahead(options)
