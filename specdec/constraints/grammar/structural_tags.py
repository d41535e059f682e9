"""Turns a structural tag into llguidance's grammars: one Lark grammar, and others for its parts.

Free text before an end is one lazy lexeme, which stops at the first complete end. Before a special token, which no text
contains, it is a greedy lexeme. Regular expressions before the end of a tag are written in the same way. See "Tool
calling" in the description of llguidance's syntax (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from specdec.constraints.limits import formats

_NO_END = ("",)
_ANY = "/(?s:.*)/"
_EMPTY = '""'
"""The empty alternative, which Lark needs written out."""
_SPACE = r"\x20"
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between JSON tokens. It is bounded, since a model could write it for ever."""


class SpecialTokens:
    """A tokenizer's special tokens. Their texts in a structural tag stand for the tokens."""

    def __init__(self, ids: Mapping[str, int], eos_token_ids: Collection[int]) -> None:
        """`ids`: token ids by text. Tokens of `eos_token_ids` end an output, so that a tag cannot contain them."""
        self._ids = ids
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pattern = _any_of(ids)

    @classmethod
    def of_tokenizer(cls, tokenizer: LLTokenizer, tokenizer_json: str) -> SpecialTokens:
        """The tokens that llguidance treats as special: marked so, or in angle brackets. Raises ValueError."""
        added = json.loads(tokenizer_json).get("added_tokens") or ()
        ids = {token["content"]: token["id"] for token in added if 0 <= token["id"] < tokenizer.vocab_size}
        special = {text: token_id for text, token_id in ids.items() if text and tokenizer.is_special_token(token_id)}
        return cls(special, tokenizer.eos_tokens)

    def pieces(self, text: str) -> list[str]:
        """Text, special token, text and so on. Only the first text may be empty; other empty ones are left out."""
        if self._pattern is None:
            return [text]
        first, *rest = self._pattern.split(text)
        return [first, *filter(None, rest)]

    def expression(self, piece: str) -> str:
        """A piece as it stands in a rule. Raises ValueError for an end-of-sequence token."""
        token_id = self._ids.get(piece)
        if token_id is None:
            return _quoted(piece) if piece else ""
        if token_id in self._eos_token_ids:
            raise ValueError(f"the token {piece!r} ends the output, so it cannot be in a tag")
        return f"<[{token_id}]>"


def structural_tag_grammar(tag: formats.Format, special_tokens: SpecialTokens) -> str:
    """The grammars as JSON. Raises ValueError for a misplaced special token or an invalid schema."""
    return _Writer(special_tokens).write(tag)


class _Writer:
    """Writes numbered rules, and terminals in capitals."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self._special_tokens = special_tokens
        self._rules: dict[tuple[str, bool], str] = {}
        """Rule names by terminal and laziness."""
        self._grammars: list[dict[str, Any]] = []

    def write(self, tag: formats.Format) -> str:
        start = self._format(tag, _NO_END)
        lines = [f"start: {start}"]
        for (terminal, lazy), name in self._rules.items():
            lines += [f"{name.upper()}: {terminal}", f"{name}{'[lazy]' if lazy else ''}: {name.upper()}"]
        lark = "\n".join(lines)
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]})

    def _format(self, tag: formats.Format, ends: Sequence[str]) -> str:
        """A rule's expression: the format, followed by one of the `ends`."""
        if (terminal := self._terminal(tag)) is not None:
            return self._until(terminal, ends)
        match tag:
            case formats.AnyText():
                return self._until(self._text(tag.excludes), ends)
            case formats.TriggeredTags():
                return self._triggered(tag, ends)
            case formats.SequenceFormat():
                return self._sequence(tag, ends)
            case formats.Either():
                return _either(self._format(each, ends) for each in tag.elements)
        return _joined(self._whole(tag), self._literals(ends))

    def _whole(self, tag: formats.Format) -> str:
        """A rule's expression for formats with an end of their own."""
        match tag:
            case formats.ConstString():
                return self._literal(tag.value)
            case formats.SchemaFormat():
                return self._grammar(json_schema_grammar(json.dumps(tag.schema), is_compact=tag.is_compact))
            case formats.LarkGrammar():
                return self._grammar(json.dumps({"grammars": [{"lark_grammar": tag.text}]}))
            case formats.Repeat():
                return _repeated(self._format(tag.content, _NO_END), tag)
            case formats.Tag():
                return _joined(self._literal(tag.begin), self._format(tag.content, tag.ends))
            case formats.SeparatedTags():
                each = _either(self._whole(one) for one in tag.tags)
                more = "" if tag.stop_after_first else f"({_joined(self._literal(tag.separator), each)})*"
                return f"({_joined(each, more)}){'' if tag.at_least_one else '?'}"
        raise TypeError(f"{type(tag).__name__} is no format")

    def _sequence(self, tag: formats.SequenceFormat, ends: Sequence[str]) -> str:
        """Adjacent regular formats become one lexeme, so that a greedy one leaves room for the next."""
        parts: list[formats.Format] = []
        for is_regular, group in groupby(tag.elements, lambda each: self._terminal(each) is not None):
            elements = tuple(group)
            parts += (formats.SequenceFormat(elements),) if is_regular else elements
        if len(parts) == 1:
            return self._format(tag.elements[0], ends)
        found = [self._format(each, _NO_END) for each in parts[:-1]]
        return _joined(*found, self._format(parts[-1], ends))

    def _triggered(self, tag: formats.TriggeredTags, ends: Sequence[str]) -> str:
        text = self._text(tag.excludes)
        dispatched = []
        for trigger in tag.triggers:
            followed = [one for one in tag.tags if one.begin.startswith(trigger)]
            if not followed:
                continue
            rests = _either(
                _joined(self._literal(one.begin[len(trigger) :]), self._format(one.content, one.ends))
                for one in followed
            )
            dispatched.append(_joined(self._until(text, (trigger,), is_trigger=True), rests))
        any_tag, close, end = _either(dispatched), self._until(text, ends), self._literals(ends)
        if tag.at_least_one:
            first = _either(self._whole(one) for one in tag.tags)
            return _joined(first, end) if tag.stop_after_first else _joined(first, f"({any_tag})*", close)
        if tag.stop_after_first:
            return _either([_joined(any_tag, end), close])
        return _joined(f"({any_tag})*", close)

    def _until(self, terminal: str, ends: Sequence[str], *, is_trigger: bool = False) -> str:
        """The terminal up to one of the ends; without ends, its longest match."""
        if tuple(ends) == _NO_END:
            return self._rule(terminal)
        texts, found = [], []
        for end in ends:
            before, *rest = self._special_tokens.pieces(end)
            if not rest:
                texts.append(_quoted(before))
                continue
            if is_trigger and before:
                raise ValueError(f"the trigger {end!r} has the special token {rest[0]!r} behind other text")
            greedy = self._rule(f"{terminal} {_quoted(before)}" if before else terminal)
            found.append(_joined(greedy, *map(self._special_tokens.expression, rest)))
        if texts:
            found.append(self._rule(f"{terminal} {_either(texts)}", lazy=True))
        return _either(found)

    def _terminal(self, tag: formats.Format) -> str | None:
        """A terminal's expression if the format is regular and has no special tokens, else None."""
        match tag:
            case formats.ConstString():
                return None if len(self._special_tokens.pieces(tag.value)) > 1 else _quoted(tag.value)
            case formats.Regex():
                return _regex(tag.pattern)
            case formats.SequenceFormat() | formats.Either():
                found = [self._terminal(each) for each in tag.elements]
                known = [each for each in found if each is not None]
                if len(known) < len(found):
                    return None
                return f"({' '.join(known)})" if isinstance(tag, formats.SequenceFormat) else _either(known)
            case formats.Repeat():
                content = self._terminal(tag.content)
                return None if content is None else _repeated(content, tag)
        return None

    def _text(self, excludes: Sequence[str]) -> str:
        # Text never contains special tokens, so that such exclusions need not be written.
        without = [_quoted(text) for text in excludes if len(self._special_tokens.pieces(text)) == 1]
        return f"({_ANY} & ~({_ANY} {_either(without)} {_ANY}))" if without else _ANY

    def _literals(self, texts: Sequence[str]) -> str:
        return "" if tuple(texts) == _NO_END else _either(map(self._literal, texts))

    def _literal(self, text: str) -> str:
        return _joined(*map(self._special_tokens.expression, self._special_tokens.pieces(text)))

    def _grammar(self, grammars: str) -> str:
        """Add a grammar; returns its name. `grammars` is JSON that holds one grammar."""
        name = f"g{len(self._grammars)}"
        (grammar,) = json.loads(grammars)["grammars"]
        self._grammars.append({**grammar, "name": name})
        return f"@{name}"

    def _rule(self, terminal: str, *, lazy: bool = False) -> str:
        return self._rules.setdefault((terminal, lazy), f"t{len(self._rules)}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """A regular expression between slashes, with inner slashes escaped."""
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return str(grammar["lark_grammar"]).removeprefix("start: ")


def _joined(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


def _either(expressions: Iterable[str]) -> str:
    return f"({' | '.join(each or _EMPTY for each in expressions)})"


def _repeated(content: str, tag: formats.Repeat) -> str:
    most = "" if tag.most is None else tag.most
    return f"({content}){{{tag.least},{most}}}"


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern with one group: the longest of these texts that matches, found in one step per character.

    Returns None without texts.
    """
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        options = [re.escape(character) + written(child) for character, child in node.items() if character]
        if len(options) == 1 and "" not in node:
            return options[0]
        return f"(?:{'|'.join(options)}){'?' if '' in node else ''}" if options else ""

    return re.compile(f"({written(trie)})") if trie else None


def json_schema_grammar(schema: str, *, is_compact: bool = False) -> str:
    """The grammar of a JSON schema (an object or a boolean, as JSON). Raises ValueError.

    `is_compact`: at most one space stands between two tokens; False: at most 40 characters of white space.
    """
    if schema.strip() in ("true", "false"):
        schema = '{"not":{}}' if schema.strip() == "false" else "{}"
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _SPACE if is_compact else _WHITE_SPACE}
    )
