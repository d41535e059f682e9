"""Deltas add up to the decoding of all ids, and never hold half a character."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.coordinator.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
)

SHIPPED = Path(__file__).parents[3] / "models" / "target" / "tokenizer.json"
TEXT = "the quick brown fox jumps over the lazy dog, été 你好 🙂👩‍🚀 ​ and on"


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("été added", special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """A vocabulary as SentencePiece makes it: pieces, and bytes for all else."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "é",
        "dog",
        "你",
    ]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@cache
def word_pieces() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "the", "dog", "##s", "##ged", ",", "fox", "été"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


@cache
def shipped() -> Tokenizer:
    if not SHIPPED.exists():
        pytest.skip("the models are not there")
    return Tokenizer.from_file(str(SHIPPED))


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = DetokenizerFactory(tokenizer).create(skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_deltas_of_random_byte_level_tokens_add_up_to_the_whole_decoding(data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(byte_level()))
    assert "".join(stream(byte_level(), ids, skip)) == byte_level().decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_deltas_of_the_shipped_tokenizer_add_up_to_the_whole_decoding(data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(shipped()))
    assert "".join(stream(shipped(), ids, skip)) == shipped().decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["piece", "byte", "character", "special"]), max_size=20),
    st.data(),
    st.booleans(),
)
def test_deltas_of_byte_fallback_tokens_add_up_when_the_bytes_are_characters(
    kinds: list[str], data: st.DataObject, skip: bool
) -> None:
    tokenizer = byte_fallback()
    ids: list[int] = []
    for kind in kinds:
        if kind == "character":
            ids += [3 + byte for byte in data.draw(st.characters(codec="utf-8")).encode()]
        elif kind == "byte":
            ids.append(3 + data.draw(st.integers(0, 127)))
        elif kind == "special":
            ids.append(data.draw(st.sampled_from([1, 2])))
        else:
            ids.append(data.draw(st.integers(259, 263)))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=12))
def test_stray_bytes_of_a_fallback_vocabulary_become_one_replacement_character_each(ids: list[int]) -> None:
    text = "".join(stream(byte_fallback(), ids, True))
    alone = "".join(stream(byte_fallback(), [0xFF + 3], True))
    assert alone == "\ufffd"
    stray_free = all(i < 3 + 128 for i in ids)
    assert not stray_free or "\ufffd" not in text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 7), max_size=40))
def test_deltas_of_any_other_decoder_add_up(ids: list[int]) -> None:
    assert "".join(stream(word_pieces(), ids, True)) == word_pieces().decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_a_delta_never_holds_half_a_character(text: str) -> None:
    ids = byte_level().encode(text).ids
    deltas = stream(byte_level(), ids, True)
    assert "".join(deltas) == text
    assert "\ufffd" in text or all("\ufffd" not in delta for delta in deltas)


def test_each_kind_of_decoder_gets_its_detokenizer() -> None:
    assert isinstance(DetokenizerFactory(byte_level()).create(True), ByteLevelDetokenizer)
    assert isinstance(DetokenizerFactory(byte_fallback()).create(True), ByteFallbackDetokenizer)
    assert isinstance(DetokenizerFactory(word_pieces()).create(True), WindowDetokenizer)


def test_a_tokens_own_text_shows_special_tokens_and_half_characters() -> None:
    factory = DetokenizerFactory(byte_level())
    assert factory.token_text(1) == "<|eos|>"
    half = byte_level().token_to_id("ð")  # the first byte of many emoji
    assert factory.token_text(half) == "\ufffd"
    assert factory.token_text(10**6) == ""


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    half = byte_level().token_to_id("ð")
    assert stream(byte_level(), [half], True) == ["", "\ufffd"]
