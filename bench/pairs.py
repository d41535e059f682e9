"""The measured pairs of target and draft, and their descriptions beside every figure.

A pair is one of `PAIRS`, or TARGET:DRAFT, where either is the name of a model below or a folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chat_drafters import TARGET as CHAT_TARGET
from bench.chat_drafters import made_drafter
from bench.checkpoints import inflated, num_parameters
from bench.inflate import Shape
from bench.noisy import noisy
from bench.packaged import PACKAGED, packaged_model
from specdec.commands.shipped_pair import shipped_head
from specdec.commands.up.plan import shipped_model

INFLATION = (
    "Inflated: a shipped model enlarged by layers, width, heads and MLP rows that contribute exactly zero, so that a "
    "step costs what the larger shape costs while every token is the shipped model's."
)
TARGETS = {
    "cpu-80m": Shape(hidden_size=1536, intermediate_size=928, num_layers=10, num_heads=12, num_kv_heads=4,
                     vocab_size=4096, num_positions=8192),
    "cpu-350m": Shape(hidden_size=1536, intermediate_size=2368, num_layers=20, num_heads=24, num_kv_heads=8,
                      vocab_size=4096, num_positions=8192),
    "gpu-1b": Shape(hidden_size=1536, intermediate_size=8960, num_layers=20, num_heads=24, num_kv_heads=4,
                    vocab_size=128256, num_positions=8192),
    "gpu-8b": Shape(hidden_size=6144, intermediate_size=14336, num_layers=22, num_heads=64, num_kv_heads=16,
                    vocab_size=128256, num_positions=8192),
    "gpu-32b": Shape(hidden_size=6144, intermediate_size=24576, num_layers=58, num_heads=96, num_kv_heads=16,
                     vocab_size=128256, num_positions=8192),
}  # fmt: skip
DRAFTS = {
    "draft-2m": Shape(hidden_size=256, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=1,
                      vocab_size=4096, num_positions=8192),
    "draft-0.5b": Shape(hidden_size=1024, intermediate_size=6144, num_layers=18, num_heads=16, num_kv_heads=4,
                        vocab_size=128256, num_positions=8192),
    "draft-1b": Shape(hidden_size=1024, intermediate_size=16384, num_layers=16, num_heads=32, num_kv_heads=8,
                      vocab_size=128256, num_positions=8192),
}  # fmt: skip
DRAFTS["draft-2m-55"] = DRAFTS["draft-2m"]
NOISE = {"draft-2m-55": 0.216}
"""Share of noise in a draft's source, by name: the shipped draft then guesses 0.55 of the target's greedy tokens."""
CHAT_DRAFT = "smollm2-draft"
PAIRS = {
    "shipped": ("shipped-target", "shipped-draft"),
    "cpu-80m": ("cpu-80m", "draft-2m"),
    "cpu-80m-55": ("cpu-80m", "draft-2m-55"),
    "cpu-350m": ("cpu-350m", "draft-2m"),
    "smollm2": (CHAT_TARGET, CHAT_DRAFT),
    "gpu-1b": ("gpu-1b", "draft-0.5b"),
    "gpu-8b": ("gpu-8b", "draft-1b"),
    "gpu-32b": ("gpu-32b", "draft-1b"),
}


class NoSuchPair(ValueError):
    """The name is neither a pair nor two models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMember:
    """A checkpoint and its source."""

    name: str
    folder: Path
    source: Path | None = None
    """The smaller checkpoint with the same outputs; None for a checkpoint that is not inflated."""
    noise: float = 0.0
    """Share of noise in the source's matrices."""

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        content: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return content

    @property
    def is_larger(self) -> bool:
        """Whether it has more parameters than its source."""
        return self.source is not None and num_parameters(self.folder) > num_parameters(self.source)

    @property
    def description(self) -> str:
        """Its name and size."""
        millions = num_parameters(self.folder) / 1e6
        if self.source is None:
            return f"{self.name} ({millions:.3g} M parameters)"
        small = num_parameters(self.source) / 1e6
        shipped = f"as shipped but for a share of {self.noise:g} noise" if self.noise else "as shipped"
        made = f"inflated from {small:.3g} M" if self.is_larger else f"{shipped}, with more positions"
        return f"{self.name} ({millions:.3g} M parameters, {made})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and a draft."""

    name: str
    target: PairMember
    draft: PairMember

    @property
    def description(self) -> str:
        """Text above every table: both models, and what inflation means where a model is inflated."""
        text = f"{self.name}: target {self.target.description}, draft {self.draft.description}."
        return f"{text} {INFLATION}" if self.target.is_larger or self.draft.is_larger else text

    @property
    def head(self) -> Path | None:
        """An EAGLE-3 head for the target: the one that ships, or the one that `bench/chat_drafters.py` has made."""
        if self.target.name == CHAT_TARGET:
            return made_drafter("eagle3")
        return shipped_head("eagle3") if self.target.name == "shipped-target" else None

    @property
    def draft_settings(self) -> dict[str, object]:
        """Settings that the draft is served with everywhere."""
        return {"weight_quantization": "int8"} if self.draft.name == CHAT_DRAFT else {}

    @property
    def caption(self) -> str:
        """Sizes in one line, for plots."""
        sizes = ", ".join(
            f"{role} {num_parameters(model.folder) / 1e6:.3g} M{' (inflated)' if model.is_larger else ''}"
            for role, model in (("target", self.target), ("draft", self.draft))
        )
        is_inflated = self.target.is_larger or self.draft.is_larger
        return f"{sizes}{'; inflated: cost of its size, output of the shipped model' if is_inflated else ''}"

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt with its output."""
        return min(int(model.config["max_position_embeddings"]) for model in (self.target, self.draft))


def resolve_pair(name: str, device: str, cache: Path | None = None) -> Pair:
    """Return a pair by its name; missing checkpoints are made on the device (`cpu` or `cuda`).

    Raises NoSuchPair.
    """
    if name in PAIRS:
        target, draft = PAIRS[name]
    else:
        target, _, draft = name.rpartition(":")
    if not target:
        raise NoSuchPair(f"{name}: neither TARGET:DRAFT nor one of {', '.join(PAIRS)}")
    return Pair(name=name, target=resolve_model(target, device, cache), draft=resolve_model(draft, device, cache))


def resolve_model(name: str, device: str, cache: Path | None = None) -> PairMember:
    """Return a model by its name or folder; a missing checkpoint is made. Raises NoSuchPair, PackageUnusable."""
    if name in ("shipped-target", "shipped-draft"):
        return PairMember(name=name, folder=Path(shipped_model(name.removeprefix("shipped-"))))
    if name in PACKAGED:
        return PairMember(name=name, folder=packaged_model(name, cache))
    if name == CHAT_DRAFT:
        folder = made_drafter("draft_model", cache)
        if folder is None:
            raise NoSuchPair(f"{name} has not been made yet: run `make smollm2-drafters`")
        return PairMember(name=name, folder=folder)
    shape = TARGETS.get(name) or DRAFTS.get(name)
    if shape is not None:
        source, noise = Path(shipped_model("target" if name in TARGETS else "draft")), NOISE.get(name, 0.0)
        if noise:
            source = noisy(source, noise, cache)
        return PairMember(name=name, folder=inflated(source, shape, name, device, cache), source=source, noise=noise)
    if not (Path(name) / "config.json").is_file():
        raise NoSuchPair(
            f"{name}: neither a folder with a config.json nor one of {', '.join((*TARGETS, *DRAFTS, *PACKAGED))}"
        )
    return PairMember(name=Path(name).name, folder=Path(name))
