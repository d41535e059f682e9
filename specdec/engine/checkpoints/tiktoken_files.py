"""Converts tiktoken's files: ranks of byte strings, without what the model's own code adds to them.

The pattern that splits texts is read from that code, which is not run; special tokens from tokenizer_config.json.
Without either, texts would be split wrongly without a word, so that the conversion is refused.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_NAMES = {"pat_str", "pattern", "pat"}
"""Names of the pattern in models' code, in lower case."""
_PATTERNS: Mapping[str, str] = {
    "llama": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
}
"""Patterns of models without code of their own, by model type."""


class NotConvertible(ValueError):
    """A tiktoken file whose pattern or special tokens are not known."""


def is_tiktoken(file: Path) -> bool:
    """Whether a file has tiktoken's format, whatever its name."""
    with file.open("rb") as stream:
        return _LINE.fullmatch(stream.readline(200)) is not None


def convert_tiktoken(file: Path, config: Mapping[str, Any], model_type: str) -> str:
    """The content of tokenizer.json for a tiktoken file.

    Args:
        file: in the model's folder, beside its code.
        config: the content of tokenizer_config.json.
        model_type: the model's.

    Raises:
        NotConvertible: the pattern or the special tokens are not known.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _ranks(file)
    converter = TikTokenConverter(vocab_file=str(file), pattern=_pattern(file.parent, model_type))
    converter.load_tiktoken_bpe = lambda _: ranks  # type: ignore[method-assign, assignment]  # its own needs the package
    tokenizer: Tokenizer = converter.converted()
    added = {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    if not added:
        raise NotConvertible("tokenizer_config.json names no special tokens")
    for number in range(max(ranks.values()) + 1, max(added) + 1):
        token = added.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        is_special = bool(token.get("special", False))
        tokenizer.add_tokens([AddedToken(token["content"], special=is_special, **flags)])
        if tokenizer.token_to_id(token["content"]) != number:
            raise NotConvertible(f"its token {token['content']} would not have the id {number}")
    return str(tokenizer.to_str())


def _ranks(file: Path) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise NotConvertible(f"{file.name} is no tiktoken file: {error}") from error


def _pattern(folder: Path, model_type: str) -> str:
    found = {pattern for code in sorted(folder.glob("*.py")) for pattern in _patterns_in(code)}
    if not found and model_type in _PATTERNS:
        return _PATTERNS[model_type]
    if len(found) != 1:
        raise NotConvertible(f"its own code names {len(found) or 'no'} patterns that split texts, not one")
    return found.pop()


def _patterns_in(code: Path) -> Iterator[str]:
    try:
        tree = ast.parse(code.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {getattr(target, "id", getattr(target, "attr", "")).lower() for target in targets}
            text = _text(node.value) if names & _NAMES else None
            if text is not None:
                yield text


def _text(node: ast.expr) -> str | None:
    """A string that is written as a constant, a sum of constants or "|".join of constants."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts, between = [_text(left), _text(right)], ""
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[listed]):
            parts = [_text(each) for each in listed.elts] if isinstance(listed, ast.List | ast.Tuple) else [None]
        case _:
            return None
    known = [part for part in parts if part is not None]
    return between.join(known) if len(known) == len(parts) else None
