"""Deltas add up to the decoding of all ids, and never hold half a character."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.coordinator.intake.validation import Limits, check_sampling
from specdec.coordinator.text.choice_output import Finish
from specdec.coordinator.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
)
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.for_each import for_each

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


def vocabulary_of(tokens: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer whose ids 0 and 1 are special, and the others these tokens."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@cache
def kinds_of_decoders() -> dict[str, Tokenizer]:
    """A tokenizer with each kind of decoder that transformers' tokenizers have."""
    bare = ["the", "dog", "s", ",", "fox", "'", "été"]
    spaced, ended = [f"▁{token}" for token in bare], [f"{token}</w>" for token in bare]
    first_space = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return {
        "byte level": byte_level(),
        "byte fallback": byte_fallback(),
        "word pieces": word_pieces(),
        "word pieces, cleaned": vocabulary_of([*bare, "##s"], decoders.WordPiece(cleanup=True)),
        "meta space": vocabulary_of([*spaced, *bare], decoders.Metaspace()),
        "meta space kept": vocabulary_of([*spaced, *bare], decoders.Metaspace(prepend_scheme="never")),
        "strip": vocabulary_of([*spaced, *bare], first_space),
        "ends of words": vocabulary_of([*ended, *bare], decoders.BPEDecoder(suffix="</w>")),
        "none": vocabulary_of(bare, None),
    }


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


@for_each(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0), decoders.Fuse()]
        ),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),
    ],
)
def test_characters_of_bytes_stay_whole_with_steps_in_other_orders(decoder: decoders.Decoder) -> None:
    tokenizer = vocabulary_of(["▁the", "t", "he", *(f"<0x{byte:02X}>" for byte in range(256))], decoder)
    draw, text = random.Random(0), "é你🙂a"
    for _ in range(40):
        ids = []
        for character in draw.choices(text, k=12):
            ids += [5 + byte for byte in character.encode()] + draw.choices([2, 3, 4], k=draw.randrange(3))
        assert "".join(stream(tokenizer, ids, True)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_a_delta_never_holds_half_a_character(text: str) -> None:
    ids = byte_level().encode(text).ids
    deltas = stream(byte_level(), ids, True)
    assert "".join(deltas) == text
    assert "\ufffd" in text or all("\ufffd" not in delta for delta in deltas)


@for_each("kind", [*kinds_of_decoders()])
def test_behind_a_prompt_the_deltas_are_what_all_ids_decode_to(kind: str) -> None:
    tokenizer = kinds_of_decoders()[kind]
    factory, num_tokens, draw = DetokenizerFactory(tokenizer), tokenizer.get_vocab_size(), random.Random(kind)
    for _ in range(300):
        skip = draw.random() < 0.5
        if kind.startswith("byte"):  # characters, some cut between prompt and output
            letters = "".join(draw.choice(["the dog ", "é", "你", "🙂", "<s>", " "]) for _ in range(draw.randint(1, 8)))
            ids = tokenizer.encode(letters, add_special_tokens=False).ids
        else:
            ids = [draw.randrange(num_tokens) for _ in range(draw.randint(1, 16))]
        cut = draw.randint(0, len(ids))
        before, behind = factory.create(skip), factory.create(skip, ids[:cut])
        prompt = "".join(before.push(token_id) for token_id in ids[:cut])
        output = "".join([*(behind.push(token_id) for token_id in ids[cut:]), behind.finish()])
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert prompt + output == whole, (ids, cut, skip)


def test_a_first_space_is_left_out_only_where_a_text_begins() -> None:
    factory = DetokenizerFactory(byte_fallback())
    the, start = byte_fallback().token_to_id("▁the"), 1
    assert factory.create(True, [start]).push(the) == "the"
    assert factory.create(True, [start, the]).push(the) == " the"
    assert factory.create(False, [start]).push(the) == " the"
    spaces = [byte_fallback().token_to_id("▁")]
    assert factory.create(True, spaces).push(the) == " the"


def test_a_tokens_own_text_has_the_space_that_only_a_start_lacks() -> None:
    for kind in ("meta space", "meta space kept", "strip", "byte fallback"):
        tokenizer = kinds_of_decoders()[kind]
        assert DetokenizerFactory(tokenizer).token_text(tokenizer.token_to_id("▁the")) == " the"


def test_a_choice_is_read_behind_its_prompt_and_stopped_by_a_hidden_special_token() -> None:
    limits = Limits(
        vocab_size=300, max_model_len=50, max_tokens=40, max_choices=4, max_stop_strings=2, max_stop_string_bytes=8,
        max_logprobs=5, max_logit_bias=3, max_prompt_bytes=1000,
    )  # fmt: skip
    factory, the, end = DetokenizerFactory(byte_fallback()), byte_fallback().token_to_id("▁the"), 2
    for params, text in [
        (api.SamplingParams(stop=["</s>"]), " the"),
        (api.SamplingParams(stop=["the</s>"]), " "),
        (api.SamplingParams(stop=[" the"]), ""),
        (api.SamplingParams(stop=["</s>"], include_stop_in_output=True), " the</s>"),
        (api.SamplingParams(stop=["</s>"], skip_special_tokens=False), " the"),
        (api.SamplingParams(stop=["/s"]), " the the"),
        (api.SamplingParams(stop=["</s>"], min_tokens=3), " the the"),
    ]:
        output = check_sampling(params, limits).output(factory, [1, the])
        step = output.take_tokens([the, end, the], Finish(pb.FINISH_REASON_LENGTH))
        assert step.text == text, params
        assert step.finish is not None
        assert (step.finish.reason == pb.FINISH_REASON_STOP) == (text != " the the")


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
