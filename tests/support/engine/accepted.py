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
    matcher, data = matcher_of(constraint, special), _encoded(text, special)
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


def ends_within(constraint: pb.Constraint, text: str, special: Mapping[str, int] = _SPECIAL) -> list[int]:
    """Characters of the starts of an accepted text that are whole outputs themselves; neither is empty."""
    matcher, num_chars, found = matcher_of(constraint, special), 0, []
    texts = {number: token for token, number in special.items()}
    for byte in _encoded(text, special)[:-1]:
        assert matcher.try_consume_tokens([byte]) == 1, text[:num_chars]
        num_chars += len(texts[byte]) if byte in texts else byte & 0xC0 != 0x80
        if matcher.is_accepting():
            found.append(num_chars)
    return found


def longest_start(constraint: pb.Constraint, text: str) -> int:
    """Bytes of a text that an output may begin with."""
    return int(matcher_of(constraint).try_consume_tokens(list(text.encode())))


def _encoded(text: str, special: Mapping[str, int]) -> list[int]:
    encoded = text.encode()
    for token, number in special.items():
        encoded = encoded.replace(token.encode(), bytes([number]))
    return list(encoded)
