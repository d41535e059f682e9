"""Texts that a constraint accepts, by a tokenizer of single bytes: it needs no model and no process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from llguidance import LLMatcher, LLTokenizer

from specdec.constraints.grammar.source import grammar_source, make_matcher
from specdec.constraints.grammar.structural_tags import SpecialTokens
from specdec.v1 import common_pb2 as pb

_SPECIAL = MappingProxyType({"<|end|>": 255})


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def matcher_of(constraint: pb.Constraint, special: Mapping[str, int] = _SPECIAL) -> LLMatcher:
    """A constraint, compiled. Raises GrammarError and ValueError.

    `special`: special tokens, each a byte that no text has, by their texts.
    """
    tokens = SpecialTokens(special, _bytes().eos_tokens)
    return make_matcher(_bytes(), grammar_source(constraint, tokens).text)


def accepts(constraint: pb.Constraint, text: str, special: Mapping[str, int] = _SPECIAL) -> bool:
    """Whether a text is a whole output."""
    matcher, encoded = matcher_of(constraint, special), text.encode()
    for token, number in special.items():
        encoded = encoded.replace(token.encode(), bytes([number]))
    data = list(encoded)
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


def longest_start(constraint: pb.Constraint, text: str) -> int:
    """Bytes of a text that an output may begin with."""
    return int(matcher_of(constraint).try_consume_tokens(list(text.encode())))
