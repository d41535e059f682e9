"""Converts sentencepiece's files of byte-pair encodings, and proves the tokens against sentencepiece itself.

transformers 5.23 converts them too, but merges pieces in another order: "two  spaces" has other tokens, without a word.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from specdec.engine.checkpoints.tiktoken_files import NotConvertible

_SPACE = "\u2581"
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SAMPLES = (
    "Hello, world!", " leading space", "two  spaces   three", "trailing space ", "def f(x):\n    return x + 1\n",
    "1234567890 3.14159", "a\tb\r\nc", "naïve café Ünïcödé", "e\u0301 combining", "ﬁ ligature ½", "日本の首都は東京。",
    "мама мыла раму", "مرحبا بالعالم", "한국어 텍스트", "😀👩‍👩‍👧 emoji", "\u200bzero width", "don't WON'T I'll", "https://a.b/c?d=e&f",
    '{"a": [1, 2.5e-3], "b": null}', "<div class='x'>\n\n\n</div>", "",
)  # fmt: skip


def convert_sentencepiece(file: Path) -> tuple[str, str]:
    """The content of tokenizer.json for a sentencepiece file, and its first token of every text.

    Raises:
        ImportError: the package sentencepiece is missing.
        NotConvertible: it is no byte-pair encoding, normalizes its texts, or has other tokens once converted.
    """
    sentencepiece: Any = importlib.import_module("sentencepiece")
    formats: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    try:
        model = formats.ModelProto.FromString(file.read_bytes())
        reference = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    except Exception as error:  # those of protobuf and of sentencepiece
        raise NotConvertible(f"{file.name} is no sentencepiece file") from error
    if model.trainer_spec.model_type != _BPE:
        raise NotConvertible(f"{file.name} is no byte-pair encoding")
    if model.normalizer_spec.precompiled_charsmap or model.normalizer_spec.remove_extra_whitespaces:
        raise NotConvertible(f"{file.name} normalizes its texts")
    tokenizer = _built(model)
    for text in _SAMPLES:
        if tokenizer.encode(text).ids != reference.encode(text):
            raise NotConvertible(f"{text!r} would have other tokens than sentencepiece gives")
    return str(tokenizer.to_str()), str(model.trainer_spec.bos_piece)


def _built(model: Any) -> Tokenizer:
    pieces = model.pieces
    vocab = {piece.piece: number for number, piece in enumerate(pieces)}
    scores = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    merges: list[tuple[float, str, str]] = []
    for whole, score in scores.items():
        splits = ((whole[:place], whole[place:]) for place in range(1, len(whole)))
        merges += [(-score, left, right) for left, right in splits if left in vocab and right in vocab]
    merges.sort(key=lambda merge: (merge[0], vocab[merge[1]], vocab[merge[2]]))
    unknown = next((piece.piece for piece in pieces if piece.type == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [(left, right) for _, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(model.trainer_spec.byte_fallback),
        )
    )
    has_prefix = bool(model.normalizer_spec.add_dummy_prefix)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if has_prefix else []),
        ]
    )
    for piece in pieces:
        if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            is_special = piece.type != _USER_DEFINED
            tokenizer.add_tokens([AddedToken(piece.piece, special=is_special, normalized=not is_special)])
    return tokenizer
