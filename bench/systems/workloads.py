"""Tasks that differ in how much of the output the prompt predicts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.prompts import Prompt

_PROMPTS = Path(__file__).parents[2] / "models" / "prompts.json"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


@dataclass(frozen=True, slots=True)
class Task:
    """One request."""

    prompt: Prompt
    prediction: Prompt
    """Tokens of the expected output; empty: none is sent."""
    temperature: float


def workloads(model: Path, count: int) -> Mapping[str, Sequence[Task]]:
    """`count` tasks of each kind, from the held-out texts in a model's tokens.

    code: continue a text; sampled: continue a text at temperature 1; edit: repeat a text with one name changed, after
    the first third of the new text and with the old text as the prediction; quote: repeat a text's lines in a comment,
    after the first of them.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [entry["text"] for entry in json.loads(_PROMPTS.read_text())][:count]

    def ids(text: str) -> Prompt:
        return tuple(tokenizer.encode(text).ids)

    def plain_ids(text: str) -> Prompt:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    found: dict[str, list[Task]] = {"code": [], "sampled": [], "edit": [], "quote": []}
    for text in texts:
        found["code"].append(Task(ids(text), (), 0.0))
        found["sampled"].append(Task(ids(text), (), 1.0))
        edited = _renamed(text)
        start = edited.find("\n", len(edited) // 3) + 1
        found["edit"].append(Task(ids(f"{text}\n\n\n{edited[:start]}"), plain_ids(text), 0.0))
        lines = [f"#     {line}" for line in text.splitlines() if line.strip()]
        quoted = "\n".join(lines[: max(2, len(lines) // 4)])
        found["quote"].append(Task(ids(f"{text}\n\n\n# The code above says:\n#\n{quoted}\n#     "), (), 0.0))
    return found


def _renamed(text: str) -> str:
    names = Counter(_NAME.findall(text))
    if not names:
        return text
    name = max(names, key=lambda each: (names[each], each))
    return re.sub(rf"\b{name}\b", f"new_{name}", text)
