"""Chats made by code: questions, programs to write, programs to edit, texts to summarise.

Their material is the standard library of the running interpreter (PSF licence, version 2) and a list of everyday
subjects. A module and a subject serve either for training drafters or for measuring, by a hash of their name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from specdec.commands.up.plan import shipped_model

KINDS = ("chat", "code", "edit", "summary")
_HELD_OUT_OF = 6
"""One of this many modules, subjects and pages is held out."""
_LEAST_CODE, _MOST_CODE = 150, 700
_LEAST_TEXT, _MOST_TEXT = 250, 900
"""Characters."""
_TRIES = 100
_SUBJECTS = (
    "the moon", "volcanoes", "bees", "chess", "bread", "rivers", "the heart", "democracy", "inflation", "vaccines",
    "music", "coffee", "bicycles", "glaciers", "whales", "poetry", "electricity", "computers", "the internet", "money",
    "friendship", "sleep", "exercise", "gardening", "cooking", "painting", "photography", "football", "swimming",
    "trees", "deserts", "the ocean", "dinosaurs", "space travel", "robots", "maps", "libraries", "schools", "trains",
    "bridges", "the weather", "earthquakes", "rice", "tea", "birds", "cats", "dogs", "horses", "winter", "summer",
    "the sun", "gravity", "atoms", "cells", "memory", "language", "writing", "history", "museums", "cities", "farms",
    "forests",
)  # fmt: skip
_QUESTIONS = (
    "Tell me five interesting facts about {}.", "Explain {} to a child.", "Write a short story about {}.",
    "Why is {} important?", "What should a beginner know about {}?", "Write a poem about {}.",
    "Give me three tips that have to do with {}.", "Write a friendly letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?", "Describe {} in one paragraph.",
    "How has our view of {} changed over time?", "Suggest a title and an outline for an essay on {}.",
    "Ask me three quiz questions about {} and give the answers.", "Write a dialogue between two people about {}.",
)  # fmt: skip
_CODE = (
    "Write a Python function `{name}` for this description:\n\n{doc}",
    "Write a Python program that uses a function `{name}`. The function is documented like this:\n\n{doc}",
    "Write unit tests for a Python function `{name}`:\n\n{doc}",
    "Explain this Python function step by step.\n\n```python\n{code}\n```",
)
_EDITS = (
    "Rename `{old}` to `{new}` in this code. Answer with the whole code.\n\n```python\n{code}\n```",
    "Add type hints to this function. Answer with the whole code.\n\n```python\n{code}\n```",
    "Add a comment above each statement of this function. Answer with the whole code.\n\n```python\n{code}\n```",
    "Repeat this code without its docstring.\n\n```python\n{code}\n```",
)
_SUMMARIES = (
    "Summarise this text in two sentences.\n\n{}",
    "List the main points of this text.\n\n{}",
    "Rewrite this text in simpler words.\n\n{}",
    "What is this text about, and who should read it?\n\n{}",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """One question to a model."""

    kind: str
    question: str
    prediction: str = ""
    """Text that much of the answer repeats; empty: none is known."""


def speaks_chats(model: Path) -> bool:
    """Whether a model answers chats: it has a chat template, and not the tokenizer of the pair that ships."""
    shipped = Path(shipped_model("target")) / "tokenizer.json"
    return (model / "chat_template.jinja").is_file() and (
        (model / "tokenizer.json").read_bytes() != shipped.read_bytes()
    )


def chats(count: int, *, held_out: bool, seed: int = 0) -> list[Chat]:
    """`count` different chats, the kinds in turns, or fewer where the material ends.

    Equal arguments give equal chats with one version of Python.
    """
    rng = random.Random(f"{seed} {held_out}")
    material = _material(held_out)
    makers = (_chat, _code, _edit, _summary)
    found: dict[Chat, None] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        found.setdefault(makers[len(found) % len(makers)](rng, material))
    return list(found)


@dataclass(frozen=True, slots=True)
class _Material:
    subjects: Sequence[str]
    functions: Sequence[tuple[str, str, str]]
    """Name, docstring and source."""
    texts: Sequence[str]


def _chat(rng: random.Random, material: _Material) -> Chat:
    return Chat("chat", rng.choice(_QUESTIONS).format(rng.choice(material.subjects)))


def _code(rng: random.Random, material: _Material) -> Chat:
    name, doc, code = rng.choice(material.functions)
    return Chat("code", rng.choice(_CODE).format(name=name, doc=doc, code=code))


def _edit(rng: random.Random, material: _Material) -> Chat:
    name, _, code = rng.choice(material.functions)
    question = rng.choice(_EDITS).format(old=name, new=f"new_{name.lstrip('_')}", code=code)
    return Chat("edit", question, f"```python\n{code}\n```")


def _summary(rng: random.Random, material: _Material) -> Chat:
    return Chat("summary", rng.choice(_SUMMARIES).format(rng.choice(material.texts)))


@functools.cache
def _material(held_out: bool) -> _Material:
    functions, texts = [], []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")):
        if _is_held_out(path.stem) == held_out:
            functions += list(_functions(path.read_text(encoding="utf-8", errors="replace")))
    for name, page in sorted(topics.items()):
        if _is_held_out(name) == held_out:
            texts += _paragraphs(page)
    if held_out:  # modules and pages repeat each other
        learned = _material(held_out=False)
        docs = {doc for _, doc, _ in learned.functions}
        functions = [each for each in functions if each[1] not in docs]
        texts = [text for text in texts if text not in learned.texts]
    return _Material([each for each in _SUBJECTS if _is_held_out(each) == held_out], functions, texts)


def _functions(source: str) -> Iterator[tuple[str, str, str]]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        doc, code = ast.get_docstring(node), "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if doc and _LEAST_CODE <= len(code) <= _MOST_CODE:
            yield node.name, doc, code


def _paragraphs(page: str) -> list[str]:
    """Prose of a page of Python's reference, in pieces of a readable length."""
    found, piece = [], ""
    for block in page.split("\n\n"):
        text = " ".join(block.split())
        if not re.match(r"[A-Z][^|+]*[.:]$", text):
            continue
        piece = f"{piece} {text}".strip()
        if len(piece) >= _LEAST_TEXT:
            found.append(piece[:_MOST_TEXT])
            piece = ""
    return found


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_OF == 0


def templated(model: Path, asked: Sequence[Chat]) -> list[tuple[Chat, tuple[int, ...]]]:
    """Chats with their prompts by a model's own chat template, as token ids."""
    from transformers import AutoTokenizer  # takes seconds

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": chat.question}] for chat in asked],
        add_generation_prompt=True,
        return_dict=False,
    )
    return [(chat, tuple(ids)) for chat, ids in zip(asked, prompts, strict=True)]
