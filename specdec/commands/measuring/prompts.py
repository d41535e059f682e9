"""Prompts to measure with: from a file, those of the shipped pair, or a few in English."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.commands.measuring.requests import Prompt
from specdec.commands.shipped_pair import shipped_pair
from specdec.engine.checkpoints.files import read_tokenizer
from specdec.service.texts import NotText, read_text

_FIELDS = ("prompt", "text", "token_ids")
_MOST_KIND = 40
"""Characters of a kind, which tables and plots show."""
ENGLISH = (
    "The harbour was quiet that morning, and the fishermen who had come down before dawn stood in small groups by the",
    "To make a simple vegetable soup, begin by chopping two onions, three carrots and a stick of celery. Then",
    "Question: Why do the leaves of many trees change their colour in autumn?\nAnswer:",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 14 March about the delayed delivery. We looked into it, and",
    "Summary of the meeting. The committee first discussed the budget for the coming year. It was agreed that",
    "A computer's memory is organised as a hierarchy: a few registers, some caches, main memory and disks. The",
    "The history of the bicycle begins in the early nineteenth century, when a baron built a wooden machine with",
    "Instructions for new members of the library: a card is issued at the desk on the ground floor. With this card you",
)


class PromptsInvalid(ValueError):
    """A file of prompts is malformed; the message names the place."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts, with their source in words."""

    source: str
    prompts: tuple[Prompt, ...]
    kinds: tuple[str, ...]
    """The kind of each prompt; empty if its file has none."""


def read_prompts(path: Path) -> Prompts:
    """Read a file of prompts.

    `.jsonl` has on each line a string, or an object with `prompt` or `text` (a string) or `token_ids` (a list), and
    optionally `kind` (a short text); `.json` has a list of these; any other file has a prompt per line. Only a line
    feed ends a line.

    Raises PromptsInvalid.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise PromptsInvalid(f"cannot read {path}: {error.strerror}") from error
    except NotText as fault:
        raise PromptsInvalid(f"{path} {fault}") from None
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    match path.suffix:
        case ".json":
            content = _parsed(text, str(path)) if lines else []
            if not isinstance(content, list):
                raise PromptsInvalid(f"{path} holds no list of prompts")
            entries = [(entry, f"{path}, entry {number}") for number, entry in enumerate(content, 1)]
        case ".jsonl":
            entries = [(_parsed(line, f"{path}, {where}"), f"{path}, {where}") for where, line in lines]
        case _:
            entries = [(line.strip(), f"{path}, {where}") for where, line in lines]
    prompts = tuple(_prompt(entry, where) for entry, where in entries)
    if not prompts:
        raise PromptsInvalid(f"{path} holds no prompt")
    return Prompts(f"{len(prompts)} of {path.name}", prompts, tuple(_kind(entry, where) for entry, where in entries))


def prompts_for(tokenizer_digest: str) -> Prompts:
    """Default prompts: the shipped pair's if the tokenizer is the shipped one, else English ones."""
    pair = shipped_pair()
    if pair is not None and tokenizer_digest == read_tokenizer(pair / "target").digest:
        shipped = read_prompts(pair / "prompts.json")
        source = f"{len(shipped.prompts)} of the shipped pair (prompts.json, Python source)"
        return dataclasses.replace(shipped, source=source)
    words = f"{len(ENGLISH)} built-in texts in English; acceptance depends on prompts, so give your own with --prompts"
    return Prompts(words, ENGLISH, ("",) * len(ENGLISH))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PromptsInvalid(f"{where} is not JSON: {error}") from error
    except RecursionError as error:
        raise PromptsInvalid(f"{where} is nested too deeply") from error


def _prompt(entry: Any, where: str) -> Prompt:
    if isinstance(entry, dict):
        entry = next((entry[name] for name in _FIELDS if name in entry), None)
    if isinstance(entry, str) and entry.strip():
        return _encodable(entry, where)
    if isinstance(entry, list) and entry and all(type(item) is int and 0 <= item < 2**32 for item in entry):
        return tuple(entry)
    raise PromptsInvalid(f"{where} is neither a text nor an object with one of {', '.join(_FIELDS)}")


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptsInvalid(f"{where} has half of a surrogate pair at character {error.start}") from error
    return text


def _kind(entry: Any, where: str) -> str:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind is None:
        return ""
    if not isinstance(kind, str) or not kind.isprintable() or not 0 < len(kind.strip()) <= _MOST_KIND:
        raise PromptsInvalid(f"{where}: kind must be a text of 1 to {_MOST_KIND} printable characters")
    return kind.strip()
