"""Settings of a training run; equal recipes and texts give equal weights on one machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from specdec.commands.train.losses import LossName

Kind = Literal["eagle3", "dspark", "medusa", "draft_model"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class TrainingRefused(ValueError):
    """The run is impossible; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings on which the weights depend."""

    kind: Kind
    loss: LossName = "kl"
    seed: int = 0
    num_steps: int = 400
    batch_sequences: int = 8
    """Texts per step."""
    learning_rate: float = 1e-3
    warmup_share: float = 0.05
    """Share of steps with a rising learning rate; then it falls along a cosine to zero."""
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    num_depths: int = 4
    """Tokens drafted ahead: passes over its own states (eagle3), slots of a block (dspark), or heads (medusa)."""
    depth_decay: float = 0.8
    """Weight of a depth relative to the depth before it."""
    draft_vocab_size: int | None = None
    """Number of tokens that a head can propose: the most frequent ones of the texts; None: all."""
    num_kept: int = 64
    """Likeliest tokens of each place whose probabilities are learned one by one, the others as one sum."""
    num_sampled: int = 4096
    """Other tokens from which a step estimates that sum for the drafter; it is exact if there are no more."""
    layer_ids: tuple[int, ...] = ()
    """Layers of the target that eagle3 and dspark read; empty: spread over its depth."""
    num_layers: int = 1
    """Layers of a small draft or of dspark, or residual blocks of each Medusa head."""
    hidden_size: int = 256
    """Hidden size of a small draft."""
    intermediate_size: int | None = None
    """Width of the MLP; None: the hidden size (eagle3, dspark), or twice that (a draft)."""
    num_heads: int = 4
    """Query heads of a layer, which has one head of keys and values."""
    markov_rank: int = 64
    """Rank of dspark's correction of a slot by the token before it."""
    initial_draft: str | None = None
    """Folder of the draft from which training continues; None: a new one."""
    reduced_precision: bool = False
    """Matrix products in bfloat16."""

    def as_json(self) -> dict[str, Any]:
        """The recipe as JSON, for a config.json and for comparison."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
