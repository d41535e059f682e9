"""Files of prompts: every form that is read, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.commands.measuring.prompts import ENGLISH, PromptsInvalid, prompts_for, read_prompts
from specdec.commands.up.plan import shipped_model
from specdec.engine.checkpoints.files import read_tokenizer


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("p.txt", "one\n\n  two  \n", ("one", "two")),
        ("p.jsonl", '"one"\n{"prompt": "two\\nlines"}\n\n{"text": "three", "id": 3}\n', ("one", "two\nlines", "three")),
        ("p.jsonl", '{"token_ids": [1, 2]}\n[3]\n', ((1, 2), (3,))),
        ("p.json", '[{"text": "a"}, "b"]', ("a", "b")),
        ("p.jsonl", '"one\u2028line\x85"\r\n"two"\r\n', ("one\u2028line\x85", "two")),
        ("p.jsonl", '\ufeff"after a byte order mark"\n', ("after a byte order mark",)),
        ("p.txt", "one\u2028line\x0c\r\ntwo", ("one\u2028line", "two")),
    ],
)
def test_each_form_is_read(tmp_path: Path, name: str, text: str, prompts: tuple[object, ...]) -> None:
    (tmp_path / name).write_text(text, newline="")
    assert read_prompts(tmp_path / name).prompts == prompts


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("p.txt", " \n\n", "holds no prompt"),
        ("p.json", "", "holds no prompt"),
        ("p.json", "[]", "holds no prompt"),
        ("p.jsonl", '"good"\nno json\n', "line 2 is not JSON"),
        ("p.jsonl", '{"question": "x"}\n', "line 1 is neither"),
        ("p.jsonl", '{"prompt": ""}\n', "line 1 is neither"),
        ("p.jsonl", '{"token_ids": [-1]}\n', "line 1 is neither"),
        ("p.json", '{"prompt": "x"}', "holds no list"),
        ("p.json", 100_000 * "[", "nested too deeply"),
        ("p.jsonl", '"good"\n"bad \\ud800"\n', "line 2 has half of a surrogate pair at character 4"),
        ("p.jsonl", '"good"\n{"prompt": "x", "kind": 3}\n', "line 2: kind must be a text"),
        ("p.jsonl", '{"prompt": "x", "kind": " "}\n', "line 1: kind"),
        ("p.jsonl", '{"prompt": "x", "kind": "two\\nlines"}\n', "line 1: kind"),
        ("p.json", '[{"prompt": "x", "kind": "' + 41 * "k" + '"}]', "entry 1: kind"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PromptsInvalid, match=why):
        read_prompts(tmp_path / name)


def test_a_prompt_may_have_a_kind(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"one"\n{"prompt": "two", "kind": " code "}\n{"text": "three", "kind": null}\n')
    assert read_prompts(tmp_path / "p.jsonl").kinds == ("", "code", "")


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptsInvalid, match="No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xc3\x28")
    with pytest.raises(PromptsInvalid, match="not UTF-8"):
        read_prompts(tmp_path / "binary.txt")


def test_the_shipped_pairs_prompts_are_for_its_tokenizer_only() -> None:
    shipped = prompts_for(read_tokenizer(Path(shipped_model("target"))).digest)
    assert list(shipped.prompts) == [
        entry["text"] for entry in json.loads((Path(shipped_model("target")).parent / "prompts.json").read_text())
    ]
    assert "prompts.json" in shipped.source
    others = prompts_for("0123")
    assert others.prompts == ENGLISH
    assert not any(others.kinds)
    assert set(shipped.kinds) == {"library", "tests"}
    assert "English" in others.source
