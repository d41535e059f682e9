"""Tokens that stand beside tokenizer.json: named in its configuration, as transformers reads a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.engine.checkpoints.files import read_tokenizer
from specdec.engine.errors import ModelLoadError
from tests.support.for_each import for_each
from tests.support.scripted.model import make_tokenizer

TEXTS = ("the <tool> dog", "<|eos|>fox <tool>", " <|pad|> the quick", "a <note> b", "quick brown")
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
PLAIN = {**FLAGS, "special": False}
END = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def folder(path: Path, config: dict[str, Any], **others: Any) -> Path:
    path.mkdir(exist_ok=True)
    content = json.loads(make_tokenizer().to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] == "<|bos|>"
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **END, **config})
    )
    for name, value in others.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


CASES: dict[str, Callable[[Path], Path]] = {
    "an end that tokenizer.json calls ordinary": lambda path: folder(path, {}),
    "additional ones": lambda path: folder(path, {"additional_special_tokens": ["<tool>", "<|pad|>"]}),
    "extra ones by name": lambda path: folder(path, {"extra_special_tokens": {"tool_token": "<tool>"}}),
    "a kind of its own": lambda path: folder(path, {"tool_token": "<tool>"}),
    "a piece of the vocabulary": lambda path: folder(path, {"additional_special_tokens": ["the"]}),
    "listed ones": lambda path: folder(
        path,
        {"added_tokens_decoder": {"320": {"content": "<tool>", **FLAGS}, "321": {"content": "<note>", **PLAIN}}},
    ),
    "listed with spaces taken": lambda path: folder(
        path, {"added_tokens_decoder": {"2": {"content": "<|pad|>", **PLAIN, "lstrip": True, "rstrip": True}}}
    ),
    "not split": lambda path: folder(path, {"split_special_tokens": True}),
    "an old map": lambda path: folder(
        path, {}, special_tokens_map={"eos_token": "<tool>", "pad_token": {"content": "<|pad|>", **FLAGS}}
    ),
    "an old map beside a list": lambda path: folder(
        path, {"added_tokens_decoder": {}}, special_tokens_map={"eos_token": "<tool>"}
    ),
}


@for_each("case", CASES)
def test_tokens_of_a_folder_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    path = CASES[case](tmp_path / "".join(filter(str.isalpha, case)))
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(path)
    files = read_tokenizer(path)
    engines = TextTokenizer(files.tokenizer_json, files.config)
    for own in (engines, TextTokenizer.from_path(path)):
        assert own.digest == files.digest
        assert (own.describe().bos_token, own.describe().eos_token) == (theirs.bos_token, theirs.eos_token)
        for text in TEXTS:
            ids = theirs(text)["input_ids"]
            assert own.encode(text) == ids
            for skip in (False, True):
                assert own.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_processors_template_is_taken_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    beside = {"chat_template": "{{ messages[0].content }}"}
    assert (
        read_tokenizer(folder(tmp_path / "a", {}, chat_template=beside)).config["chat_template"]
        == "{{ messages[0].content }}"
    )
    own = folder(tmp_path / "b", {"chat_template": "own"}, chat_template=beside)
    assert TextTokenizer.from_path(own).chat_template().source == "own"


def test_a_broken_file_beside_the_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"special_tokens_map.json is no JSON object; download it again"):
        read_tokenizer(folder(tmp_path / "a", {}, special_tokens_map=[]))
    path = folder(tmp_path / "b", {})
    (path / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"chat_template.json cannot be read: .*; download it again"):
        read_tokenizer(path)
