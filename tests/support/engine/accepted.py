"""Texts that a constraint accepts, by a tokenizer of single bytes: it needs no model and no process."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from specdec.constraints.grammar.source import grammar_source, make_matcher
from specdec.constraints.grammar.structural_tags import SpecialTokens
from specdec.v1 import common_pb2 as pb


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def matcher_of(constraint: pb.Constraint) -> LLMatcher:
    """A constraint, compiled. Raises GrammarError and ValueError."""
    tokens = SpecialTokens({"<|end|>": 255}, _bytes().eos_tokens)
    return make_matcher(_bytes(), grammar_source(constraint, tokens).text)


def accepts(constraint: pb.Constraint, text: str) -> bool:
    """Whether a text is a whole output."""
    matcher, data = matcher_of(constraint), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and bool(matcher.is_accepting())


def longest_start(constraint: pb.Constraint, text: str) -> int:
    """Bytes of a text that an output may begin with."""
    return int(matcher_of(constraint).try_consume_tokens(list(text.encode())))
