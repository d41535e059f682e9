"""Settings of one engine: model, device, numerics and memory."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from specdec.engine.sublayers import read_layers

Layers = Annotated[tuple[int, ...], NoDecode, BeforeValidator(read_layers)]
"""Layer numbers, or text such as `3-6,8`."""

_DEFAULT_ROWS = {"cpu": 512, "cuda": 2048}
"""Rows of one step by kind of device."""


def leads_nowhere(model: str) -> bool:
    """Whether a model is named by a path, where nothing is. A hub's or store's name is none."""
    return model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists()


class EngineSettings(BaseModel):
    """Settings to run a model; the rest follows from the model's config.

    ``None``: derived, see each field. Invalid values raise ``pydantic.ValidationError``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1, description="Directory of a transformers model, or a hub id.")
    revision: str | None = Field(default=None, description="Hub revision (branch, tag or commit).")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Weights and KV cache; auto is float32 on CPU, the checkpoint's dtype on CUDA.",
    )
    weight_quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        default="none",
        description="Rounds linear weights to 8 bits, a scale per output, or 4 bits, a scale per output and 32 inputs. "
        "int8 and int4 need float32 on a CPU, native kernels and one rank; fp8 needs a GPU of compute capability 8.9, "
        "a model of Llama's shape and one rank. Changes the output at a target, not at a draft.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="Keys and values of a draft; auto: the model's dtype. fp8 (E4M3, without scales) takes half of "
        "bfloat16's memory, a GPU of compute capability 8.9 or a CPU, where it is slower, and one rank. Refused at a "
        "target, whose output it would change.",
    )
    exit_layer: int | None = Field(
        default=None,
        ge=1,
        description="Layers after which the model ends: a draft with the target's weights, for models trained for "
        "early exit. Like the skipped layers it changes the output at a target, not at a draft.",
    )
    skip_attention_layers: Layers = Field(
        default=(), description="Layers without attention, numbered from 0, such as 3-6,8."
    )
    skip_mlp_layers: Layers = Field(default=(), description="Layers without MLP, numbered from 0, such as 3-6,8.")
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device of the model; auto: cuda:0 if there is one, else cpu.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of ranks that share every layer: GPUs of this machine from `device` on, or "
        "processes on CPU. Must divide the attention heads and the KV heads.",
    )
    collective_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds that a rank waits for another within a step before the replica gives up.",
    )
    num_threads: int = Field(default=1, ge=1, le=256, description="Threads of the CPU kernels, per rank.")
    block_size: int = Field(default=16, ge=1, le=1024, description="KV slots per block.")
    num_blocks: int | None = Field(default=None, ge=1, description="KV blocks; null: as many as the budget holds.")
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="KV cache of each rank in bytes; null: 1 GiB on a CPU; on CUDA 90 % of what weights, the largest "
        "step, captured steps and configured heads leave free.",
    )
    gpu_memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Greatest share of a GPU's memory for the process, with weights, if others use the GPU; "
        "null: all that is free.",
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Tokens of the longest sequence; null: the model's limit."
    )
    max_batch_tokens: int | None = Field(default=None, ge=1, description="Rows of one step; null: 512, on a GPU 2048.")
    max_batch_seqs: int = Field(default=64, ge=1, description="Sequences of one step.")
    deterministic: bool | None = Field(
        default=None,
        description="Row invariance. true: required (loading fails without it), on GPUs by matrix products that are "
        "slower with many rows. Otherwise only CPU float32 has it, where it is free.",
    )
    trust_remote_code: bool = Field(default=False, description="Allow code from the model's repository.")
    native: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="C++ kernels for CPUs. auto: those of the wheel or a compiler, if any; on: fail without them.",
    )
    fused: Literal["auto", "off"] = Field(
        default="auto", description="One native call per step for Llama-like models on CPU float32."
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy makes random weights from the model's config, for benchmarks."
    )
    self_test: bool = Field(
        default=True,
        description="Compare paged with dense logits at load; off only for models that passed before.",
    )

    def rows_of_step(self, device_type: str) -> int:
        """`max_batch_tokens`, or its default on a kind of device."""
        return self.max_batch_tokens or _DEFAULT_ROWS.get(device_type, _DEFAULT_ROWS["cpu"])

    @property
    def skips_sublayers(self) -> bool:
        """Whether the model runs without some of its sublayers."""
        return self.exit_layer is not None or bool(self.skip_attention_layers or self.skip_mlp_layers)

    @model_validator(mode="after")
    def _check_skipping(self) -> Self:
        if self.skips_sublayers and self.tensor_parallel_size > 1:
            raise ValueError("exit_layer, skip_attention_layers and skip_mlp_layers need tensor_parallel_size 1")
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.kv_cache_dtype == "fp8" and self.tensor_parallel_size > 1:
            raise ValueError("kv_cache_dtype fp8 needs tensor_parallel_size 1")
        if self.weight_quantization == "none":
            return self
        if self.native == "off" and self.weight_quantization != "fp8":
            raise ValueError("weight_quantization needs native kernels, and native is off")
        if self.tensor_parallel_size > 1:
            raise ValueError("weight_quantization needs tensor_parallel_size 1")
        if self.weight_quantization == "fp8" and (self.deterministic or self.fused == "off"):
            raise ValueError("weight_quantization fp8 needs deterministic false and fused auto")
        return self
