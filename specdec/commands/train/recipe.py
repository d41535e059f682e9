"""What a training run is made of; equal recipes over equal texts give equal weights on one machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from specdec.commands.train.losses import LossName

Kind = Literal["eagle3", "dspark", "medusa", "draft_model"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class TrainingRefused(ValueError):
    """What is asked for cannot be trained; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that weights depend on, besides the target and the texts."""

    kind: Kind
    loss: LossName = "kl"
    seed: int = 0
    num_steps: int = 400
    batch_sequences: int = 8
    """Texts of a step."""
    learning_rate: float = 1e-3
    warmup_share: float = 0.05
    """Of all steps; then down along a cosine to zero."""
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    num_depths: int = 4
    """Tokens ahead: passes over its own states (eagle3), slots of a block (dspark), or heads (medusa)."""
    depth_decay: float = 0.8
    """Weight of a depth over that of the one before."""
    draft_vocab_size: int | None = None
    """Tokens that a head can name, the most frequent ones of the texts; None: all."""
    layer_ids: tuple[int, ...] = ()
    """Layers of the target that eagle3 and dspark read; empty: spread over its depth."""
    num_layers: int = 1
    """Of a small draft or of dspark, or residual blocks of each Medusa head."""
    hidden_size: int = 256
    """Of a small draft."""
    intermediate_size: int | None = None
    """Of the layer's MLP; None: as wide as its hidden size (eagle3, dspark), or twice that (a draft)."""
    num_heads: int = 4
    """Query heads of the layer; it has one of keys and values."""
    markov_rank: int = 64
    """Of what a slot of dspark hears of the token before it."""
    initial_draft: str | None = None
    """Folder of a draft that is trained on; None: a new one."""
    reduced_precision: bool = False
    """Matrix products in bfloat16."""

    def as_json(self) -> dict[str, Any]:
        """For a config.json, or to compare with another run's."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
