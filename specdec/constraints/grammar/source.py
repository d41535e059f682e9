"""Turns a constraint into the text that llguidance compiles."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypedDict

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.constraints.grammar.structural_tags import SpecialTokens, json_schema_grammar, structural_tag_grammar
from specdec.constraints.limits import fault_of
from specdec.constraints.limits.faults import GrammarError
from specdec.constraints.limits.structural_tags import read_structural_tag
from specdec.v1 import common_pb2 as pb

CONSTRAINTS_ID = f"llguidance-{llguidance.__version__}"
"""Equal ids give equal masks."""
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 20_000,
    # Above 65,525 symbols the parser panics.
    "max_grammar_size": 60_000,
}
"""llguidance's limits. They count work, not time, so that a grammar fails at every replica or at none. A mask takes at
most 15 ms.
"""
_MOST_MESSAGE_CHARS = 300


class TokenizerArguments(TypedDict):
    """Arguments of llguidance's tokenizer, as JSON."""

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A checked constraint."""

    field: str
    """Path of the field, such as constraint.regex."""
    text: str
    """llguidance's grammar text."""


def grammar_source(constraint: pb.Constraint, special_tokens: SpecialTokens) -> GrammarSource:
    """Check a constraint without compiling it. Raises GrammarError, which names the field."""
    if (fault := fault_of(constraint)) is not None:
        raise GrammarError(*fault)
    form = str(constraint.WhichOneof("form"))
    field = f"constraint.{form}"
    if form == "regex":
        return GrammarSource(field, LLMatcher.grammar_from_regex(constraint.regex))
    if form == "grammar":
        return GrammarSource(field, LLMatcher.grammar_from_lark(constraint.grammar))
    if form == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choice.texts)
        return GrammarSource(field, LLMatcher.grammar_from_lark(f"start: {texts}"))
    try:
        if form == "structural_tag":
            tag = read_structural_tag(constraint.structural_tag)
            return GrammarSource(field, structural_tag_grammar(tag, special_tokens))
        schema = '{"type":"object"}' if form == "json_object" else constraint.json_schema
        return GrammarSource(field, json_schema_grammar(schema))
    except ValueError as error:
        raise GrammarError(field, shown(str(error))) from None


def without_tokens_from(vocab_size: int, tokenizer_json: str) -> str:
    """A tokenizer.json without the ids from `vocab_size` on, which a model has no logits for. Raises ValueError."""
    content = json.loads(tokenizer_json)
    content["added_tokens"] = [token for token in content.get("added_tokens") or () if token["id"] < vocab_size]
    model = content.get("model", {})
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {token: token_id for token, token_id in vocab.items() if token_id < vocab_size}
    elif isinstance(vocab, list):
        model["vocab"] = vocab[:vocab_size]
    return json.dumps(content)


def make_tokenizer(arguments: TokenizerArguments) -> LLTokenizer:
    """A trie of the tokens' bytes. Raises ValueError if llguidance does not support the tokenizer."""
    return LLTokenizer(arguments["tokenizer"], n_vocab=arguments["n_vocab"], eos_token=arguments["eos_token"])


def make_matcher(tokenizer: LLTokenizer, text: str, *, with_mask: bool = True) -> LLMatcher:
    """Compile. An unchecked text may take seconds or kill the process (see `GrammarChecker`).

    `with_mask`: also compute the first mask.

    Raises:
        ValueError: the text does not compile; the message is for clients.
    """
    limits = LLParserLimits(precompute_large_lexemes=True, verbose_errors=False, **_LIMITS)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if with_mask and not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(shown(matcher.get_error()))
    return matcher


def shown(error: str) -> str:
    """llguidance's error for a client, without internal state."""
    if error.startswith("panic") or "schema too large" in error:
        return "is too large"
    if error.startswith("oneOf"):
        return (
            "oneOf is supported only if no value can match two of its schemas; "
            'set "x-guidance": {"coerce_one_of": true} in the schema to treat it as anyOf'
        )
    if error.startswith("NoExtensionBias"):
        return "no text matches it"
    text = error.split("\n<state>")[0].split("\n<non-verbose/>")[0].replace("\n", " ").strip()
    return text if len(text) <= _MOST_MESSAGE_CHARS else f"{text[:_MOST_MESSAGE_CHARS]}..."
