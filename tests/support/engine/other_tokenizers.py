"""Drafts whose tokenizer is not the target's, made from the shipped one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from specdec.commands.shipped_pair import shipped_pair
from specdec.drafting.translation.tokens import TokenBytes

_EMBEDDING = "model.embed_tokens.weight"


def permuted_draft(folder: Path, seed: int = 3, base: Path | None = None) -> Path:
    """Write the shipped draft, or `base`, with permuted ids: the same tokens and distributions."""
    config = json.loads(((base or _shipped_draft()) / "config.json").read_text())
    order = list(range(config["vocab_size"]))
    random.Random(seed).shuffle(order)
    return _with_ids(folder, order, lambda vocabulary, merges: (vocabulary, merges), base)


def draft_with_fewer_tokens(folder: Path, num_tokens: int) -> Path:
    """Write the shipped draft with its first `num_tokens` tokens only; other texts need several tokens."""

    def cut(vocabulary: dict[str, int], merges: list[Any]) -> tuple[dict[str, int], list[Any]]:
        kept = {token: token_id for token, token_id in vocabulary.items() if token_id < num_tokens}
        return kept, [merge for merge in merges if "".join(_pair(merge)) in kept]

    order = list(range(num_tokens))
    random.Random(num_tokens).shuffle(order)
    return _with_ids(folder, order, cut)


def draft_of_another_family(folder: Path, texts: Iterable[str], num_tokens: int = 500) -> Path:
    """Write a model of the shipped draft's size with a small BPE trained on `texts`.

    Tokens that the shipped draft has, too, get their embeddings; the others get random rows of its embedding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _with_tokenizer(folder, json.loads(tokenizer.to_str()), tokenizer.get_vocab_size())


def draft_of_pieces(folder: Path, texts: Iterable[str], num_tokens: int = 700) -> Path:
    """`draft_of_another_family` with a SentencePiece-like tokenizer: "▁" for spaces, and byte tokens as fallback."""
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=["<unk>", "<s>", "</s>", *of_bytes], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in of_bytes]
    return _with_tokenizer(folder, content, tokenizer.get_vocab_size())


def _with_tokenizer(folder: Path, tokenizer: dict[str, Any], num_tokens: int) -> Path:
    weights, config = _copied(folder)
    known = TokenBytes((folder / "tokenizer.json").read_text())
    of_bytes = {known.bytes_of(token_id): token_id for token_id in known.ids}
    tokens = TokenBytes(json.dumps(tokenizer))
    rows = torch.randint(0, 4096, (num_tokens,), generator=torch.Generator().manual_seed(5))
    for token_id in tokens.ids:
        rows[token_id] = of_bytes.get(tokens.bytes_of(token_id), int(rows[token_id]))
    weights[_EMBEDDING] = weights[_EMBEDDING][rows].contiguous()
    config |= {"vocab_size": num_tokens, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    _write(folder, tokenizer, weights, config)
    return folder


def _with_ids(
    folder: Path,
    order: list[int],
    cut: Callable[[dict[str, int], list[Any]], tuple[dict[str, int], list[Any]]],
    base: Path | None = None,
) -> Path:
    """Write a draft with new ids; `order` has the old id of each new one."""
    weights, config = _copied(folder, base)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    new = {old: index for index, old in enumerate(order)}
    model = tokenizer["model"]
    vocabulary, model["merges"] = cut(model["vocab"], model["merges"])
    model["vocab"] = {token: new[token_id] for token, token_id in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = new[token["id"]]
    for token in tokenizer["post_processor"]["special_tokens"].values():
        token["ids"] = [new[token_id] for token_id in token["ids"]]
    weights[_EMBEDDING] = weights[_EMBEDDING][torch.tensor(order)].contiguous()
    config["vocab_size"] = len(order)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "pard_token"):
        if name in config:
            config[name] = new[config[name]]
    _write(folder, tokenizer, weights, config)
    return folder


def _shipped_draft() -> Path:
    pair = shipped_pair()
    assert pair is not None
    return pair / "draft"


def _copied(folder: Path, base: Path | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    shutil.copytree(base or _shipped_draft(), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def _write(folder: Path, tokenizer: dict[str, Any], weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pair(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)
