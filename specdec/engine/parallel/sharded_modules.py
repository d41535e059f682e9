"""Replacements of a model's modules whose weights are split over ranks.

Their linear parts stay plain ``nn.Linear`` modules, so that they can be replaced by packed ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec.engine.parallel.rank_group import RankGroup


class RowSplitLinear(nn.Module):
    """A linear layer split by inputs: the ranks' outputs are summed, then the bias is added."""

    def __init__(self, local: nn.Linear, group: RankGroup, *, splits_input: bool) -> None:
        """``local``: this rank's columns of the weight; ``splits_input``: inputs arrive unsplit."""
        super().__init__()
        self.bias: nn.Parameter | None = local.bias
        local.register_parameter("bias", None)
        self.local = local
        self._num_inputs = local.in_features
        self._first_input = local.in_features * group.rank if splits_input else None
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs, on every rank."""
        if self._first_input is not None:
            x = x.narrow(-1, self._first_input, self._num_inputs)
        out = self._group.sum(self.local(x))
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer split by outputs, which are gathered on all ranks."""

    def __init__(self, local: nn.Linear, group: RankGroup, out_features: int) -> None:
        super().__init__()
        self.local = local
        self.out_features = out_features
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs, on every rank."""
        return self._group.gather_columns(self.local(x), self.out_features)


class VocabSplitEmbedding(nn.Module):
    """An embedding split by tokens; each row comes from the rank that has it."""

    def __init__(self, local: nn.Embedding, group: RankGroup) -> None:
        """``local``: the tokens from ``ceil(num_embeddings / size) * rank`` on; may be empty."""
        super().__init__()
        self.local = local
        self._first_token = -(-local.num_embeddings // group.size) * group.rank
        self._num_tokens = local.weight.shape[0]
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows; models read its dtype and device."""
        return self.local.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """All rows, on every rank. Ids outside the vocabulary give zeros."""
        if self._num_tokens == 0:
            rows = self.local.weight.new_zeros(*input_ids.shape, self.local.embedding_dim)
            return self._group.sum(rows)
        places = input_ids - self._first_token
        is_here = (places >= 0) & (places < self._num_tokens)
        rows = self.local(places.clamp(0, self._num_tokens - 1))
        return self._group.sum(rows * is_here[..., None])


class SummedOutput(nn.Module):
    """A module whose outputs are summed over the ranks: mixtures of experts, each expert split over all ranks."""

    def __init__(self, local: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.local = local
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum, on every rank."""
        return self._group.sum(self.local(*args, **kwargs))
