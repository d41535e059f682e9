"""A Llama checkpoint as a GGUF file in float32, for llama.cpp.

Prompts go to the server as token ids, so the file's tokenizer only needs a name for every id. The end-of-sequence token
is written as an ordinary one, because all systems decode past it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from bench.systems.system import LeftOut
from specdec.engine.checkpoints.files import weights_digest

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32_TENSOR = 0
_NORMAL_TOKEN = 1
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_of(folder: Path, cache: Path) -> Path:
    """Return the GGUF file of a checkpoint, which is written unless it exists. Raises LeftOut for other families."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise LeftOut(f"llama.cpp: only Llama checkpoints without biases are converted, {folder.name} is another")
    if not (folder / "tokenizer.json").is_file():
        raise LeftOut(f"llama.cpp: {folder.name} has no tokenizer.json")
    file = cache / f"{folder.name}-{weights_digest(folder)[:12]}.gguf"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as stream:
            _write(stream, folder, config)
        unfinished.rename(file)
    return file


def _write(stream: BinaryIO, folder: Path, config: Mapping[str, Any]) -> None:
    weights: dict[str, torch.Tensor] = {}
    for part in sorted(folder.glob("*.safetensors")):
        weights |= load_file(part)
    tensors = {_name(name): (name, weight) for name, weight in weights.items()}
    facts = list(_facts(folder, config))
    stream.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(facts)))
    for name, kind, value in facts:
        stream.write(_string(name) + struct.pack("<I", kind) + _value(kind, value))
    offset = 0
    for name, (_, weight) in tensors.items():
        lengths = list(reversed(weight.shape))
        stream.write(_string(name) + struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths))
        stream.write(struct.pack("<IQ", _F32_TENSOR, offset))
        offset += _padded(4 * weight.numel())
    stream.write(b"\0" * (_padded(stream.tell()) - stream.tell()))
    for source, weight in tensors.values():
        stream.write(_in_order(source, weight.float(), config).contiguous().numpy().tobytes())
        stream.write(b"\0" * (_padded(stream.tell()) - stream.tell()))


def _facts(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads") or config["num_attention_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    yield "general.architecture", _STRING, "llama"
    yield "general.name", _STRING, folder.name
    for name, number in numbers.items():
        yield f"llama.{name}", _UINT32, number
    yield "llama.attention.layer_norm_rms_epsilon", _FLOAT32, config["rms_norm_eps"]
    yield "llama.rope.freq_base", _FLOAT32, rope.get("rope_theta", config.get("rope_theta", 10000.0))
    yield from _tokenizer(folder, config)


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    content = json.loads((folder / "tokenizer.json").read_text())
    names = {number: text for text, number in content["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in content.get("added_tokens", [])}
    tokens = [names.get(number, f"<unused{number}>") for number in range(config["vocab_size"])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    padding = config.get("pad_token_id") or 0
    yield "tokenizer.ggml.model", _STRING, "gpt2"
    yield "tokenizer.ggml.pre", _STRING, "gpt-2"
    yield "tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)
    yield "tokenizer.ggml.token_type", _ARRAY, (_INT32, [_NORMAL_TOKEN] * len(tokens))
    yield "tokenizer.ggml.merges", _ARRAY, (_STRING, merges)
    yield "tokenizer.ggml.bos_token_id", _UINT32, config.get("bos_token_id") or 0
    yield "tokenizer.ggml.eos_token_id", _UINT32, padding
    yield "tokenizer.ggml.padding_token_id", _UINT32, padding
    yield "tokenizer.ggml.add_bos_token", _BOOL, False


def _name(source: str) -> str:
    module, _, kind = source.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    if inner not in _INSIDE:
        raise LeftOut(f"llama.cpp: no name for {source}")
    return f"blk.{layer}.{_INSIDE[inner]}.{kind}"


def _in_order(source: str, weight: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Weights in llama.cpp's order of rows: its rotary embedding pairs neighbours, transformers' pairs halves."""
    if not source.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    is_query = source.endswith("q_proj.weight")
    num_heads = config["num_attention_heads"]
    if not is_query:
        num_heads = config.get("num_key_value_heads") or num_heads
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    formats = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}
    return struct.pack(formats[kind], value)


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
