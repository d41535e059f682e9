"""Tokenizers without tokenizer.json: converted to the same tokens, or refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from specdec.engine.checkpoints import tokenizer_conversion
from specdec.engine.checkpoints.files import read_eos_token_ids, read_tokenizer
from specdec.engine.errors import ModelLoadError
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.for_each import for_each

PATTERN = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+|\p{N}{1,3}|\s+"
CODE = f"""
class TikTokenTokenizer:
    pat_str = "|".join([{", ".join(map(repr, PATTERN.split("|", 1)))}])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model", num_layers=1)


def test_a_vocabulary_with_merges_becomes_a_tokenizer_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    text = read_tokenizer(folder).tokenizer_json
    assert Tokenizer.from_str(text).encode("ab").ids == [2]

    def never(*_: object) -> str:
        raise AssertionError("converted again")

    monkeypatch.setattr(tokenizer_conversion, "_convert", never)
    assert read_tokenizer(folder).tokenizer_json == text


def test_a_tokenizer_that_cannot_be_converted_is_named(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"no sentencepiece")
    with pytest.raises(
        ModelLoadError, match=r"no tokenizer.json, and tokenizer.model cannot be converted .*pip install"
    ):
        read_tokenizer(folder)


def tiktoken_folder(folder: Path, name: str = "tiktoken.model", **config: object) -> Path:
    """Bytes, "ab" and a special token after a gap."""
    tokens = [bytes([number]) for number in range(256)] + [b"ab", "漢字".encode(), b"12", b"123"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / name).write_text("".join(lines))
    special = {"content": "[BOS]", "special": True, "normalized": False}
    settings = {"added_tokens_decoder": {"262": special}, "bos_token": "[BOS]", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_tiktoken_file_is_split_as_the_models_own_code_says(folder: Path, no_cache: None) -> None:
    tiktoken_folder(folder, auto_map={"AutoTokenizer": ["tokenization_own.TikTokenTokenizer", None]})
    (folder / "tokenization_own.py").write_text(CODE)
    built = Tokenizer.from_str(read_tokenizer(folder).tokenizer_json)
    assert built.encode("漢字ab12345").tokens[1:] == ["ab", "123", "4", "5"]
    assert built.encode("漢字ab").ids == [257, 256]
    assert built.encode("[BOS]ab").ids == [262, 256]
    assert built.token_to_id("<|reserved_token_261|>") == 261
    assert built.decode(built.encode("漢字ab12345").ids) == "漢字ab12345"


def test_a_tiktoken_file_without_a_known_pattern_or_special_tokens_is_refused(folder: Path, no_cache: None) -> None:
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "model_type": "deepseek_v3"}))
    tiktoken_folder(folder)
    with pytest.raises(ModelLoadError, match=r"names no patterns that split texts, not one; add a tokenizer\.json"):
        read_tokenizer(folder)
    (folder / "tokenization_own.py").write_text(CODE + "\nPATTERN = 'x+'\n")
    with pytest.raises(ModelLoadError, match="names 2 patterns"):
        read_tokenizer(folder)
    (folder / "tokenization_own.py").write_text(CODE)
    tiktoken_folder(folder, added_tokens_decoder={})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json names no special tokens"):
        read_tokenizer(folder)


def test_a_llamas_tiktoken_file_needs_no_code(folder: Path, no_cache: None) -> None:
    found = read_tokenizer(tiktoken_folder(folder, "tokenizer.model", add_bos_token=True))
    built = Tokenizer.from_str(found.tokenizer_json)
    assert built.encode("ab").ids == [262, 256]
    assert built.encode("1234").tokens == ["[BOS]", "123", "4"]


def test_a_home_that_cannot_be_written_costs_only_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert read_tokenizer(tiktoken_folder(folder, "tokenizer.model")).vocab_size == 263


VOCAB: dict[str, Any] = {"type": "WordLevel", "vocab": {"</s>": 2, "a": 3}, "unk_token": "a"}
UNIGRAM: dict[str, Any] = {"type": "Unigram", "vocab": [["a", 0.0], ["b", 0.0], ["</s>", 0.0]], "unk_id": 0}
TURN = {"content": "<|im_end|>", "id": 7}


@for_each(
    "model, config, generation_config, ends",
    [
        (VOCAB, {"eos_token": "<|im_end|>"}, {"eos_token_id": 2}, (2, 7)),
        (VOCAB, {"eos_token": {"content": "<|im_end|>"}}, {"eos_token_id": [7, 2]}, (7, 2)),
        (VOCAB, {"eos_token": "<|im_end|>"}, None, (5, 7)),
        (VOCAB, {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}}, None, (5, 9)),
        (VOCAB, {"eos_token": "</s>"}, {"eos_token_id": -1}, (2,)),
        (UNIGRAM, {"eos_token": "</s>"}, None, (5, 2)),
        (VOCAB, {"eos_token": "<unknown>"}, None, (5,)),
        (VOCAB, {"eos_token": "<end>", "added_tokens_decoder": {"10": {"content": "<end>"}}}, None, (5,)),
        (VOCAB, {"eos_token": None}, None, (5,)),
        (VOCAB, {}, {"eos_token_id": 2}, (2,)),
    ],
)
def test_an_output_also_ends_with_the_tokenizers_end(
    model: dict[str, Any],
    config: dict[str, Any],
    generation_config: dict[str, Any] | None,
    ends: tuple[int, ...],
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": [TURN]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    file = tmp_path / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation_config is not None:
        file.write_text(json.dumps(generation_config))
    assert read_eos_token_ids(tmp_path, 5, read_tokenizer(tmp_path), vocab_size=10) == ends
