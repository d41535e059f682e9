"""Tokenizers without tokenizer.json: converted to the same tokens, or refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specdec.engine.checkpoints import tokenizer_conversion
from specdec.engine.checkpoints.files import read_tokenizer
from specdec.engine.errors import ModelLoadError
from tests.support.engine.tiny_models import save_tiny_model

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
