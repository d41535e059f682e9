"""Tasks that differ in how much of the output the prompt predicts."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.chats import KINDS, chats, speaks_chats, templated
from bench.prompts import Prompt

_PROMPTS = Path(__file__).parents[2] / "models" / "prompts.json"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


@dataclass(frozen=True, slots=True)
class Task:
    """One request."""

    prompt: Prompt
    prediction: Prompt
    """Tokens of the expected output; empty: none is sent."""
    stops: bool = False
    """Whether the output ends with the model's end of sequence."""


def workloads(model: Path, count: int) -> Mapping[str, Sequence[Task]]:
    """`count` tasks of each kind in a model's tokens, from held-out texts.

    code: continue a text; edit: repeat a text with one name changed, after the first third of the new text and with the
    old text as the prediction; quote: repeat a text's lines in a comment, after the first of them. A chat model gets
    the kinds of `bench/chats.py`.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(text: str) -> Prompt:
        return tuple(tokenizer.encode(text).ids)

    def plain_ids(text: str) -> Prompt:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    if speaks_chats(model):
        found: dict[str, list[Task]] = {kind: [] for kind in KINDS}
        for chat, prompt in templated(model, chats(len(KINDS) * count, held_out=True)):
            prediction = plain_ids(chat.prediction) if chat.prediction else ()
            found[chat.kind].append(Task(prompt, prediction, stops=True))
        return found
    texts = [entry["text"] for entry in json.loads(_PROMPTS.read_text())]
    found = {"code": [], "edit": [], "quote": []}
    for text in itertools.islice(itertools.cycle(texts), count):
        found["code"].append(Task(ids(text), ()))
        edited = _renamed(text)
        start = edited.find("\n", len(edited) // 3) + 1
        found["edit"].append(Task(ids(f"{text}\n\n\n{edited[:start]}"), plain_ids(text)))
        lines = [f"#     {line}" for line in text.splitlines() if line.strip()]
        quoted = "\n".join(lines[: max(2, len(lines) // 4)])
        found["quote"].append(Task(ids(f"{text}\n\n\n# The code above says:\n#\n{quoted}\n#     "), ()))
    return found


def _renamed(text: str) -> str:
    names = Counter(_NAME.findall(text))
    if not names:
        return text
    name = max(names, key=lambda each: (names[each], each))
    return re.sub(rf"\b{name}\b", f"new_{name}", text)
