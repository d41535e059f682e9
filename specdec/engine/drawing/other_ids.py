"""Ids that tokens are drawn by, where these are not the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class OtherIds:
    """By what tokens are drawn in place of a model's own ids: noise, cuts, ends and ties go by these."""

    inputs: Sequence[int]
    """[ids]: the model's id for each."""
    columns: Sequence[int]
    """[ids that are drawn], the first ones: the model's id whose logit it has; -1: it is never drawn."""

    def check(self, num_logits: int) -> None:
        """Raises ``ValueError`` unless all stand for ids below `num_logits`."""
        if len(self.columns) > len(self.inputs):
            raise ValueError(f"{len(self.inputs)} ids, of which {len(self.columns)} are drawn")
        for name, least, ids in (("inputs", 0, self.inputs), ("columns", -1, self.columns)):
            if not all(least <= each < num_logits for each in ids):
                raise ValueError(f"{name}: an id that is none of the model's {num_logits}")


class IdTables:
    """Both lists on the devices where they are used."""

    def __init__(self, ids: OtherIds, device: torch.device, logits_device: torch.device) -> None:
        self._inputs = torch.tensor(ids.inputs, dtype=torch.int64, device=device)
        columns = torch.tensor(ids.columns, dtype=torch.int64, device=logits_device)
        self._lacks = columns < 0
        self._columns = columns.clamp(min=0)

    def model_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model's ids for those of a batch, [T] int64."""
        return self._inputs.index_select(0, token_ids)

    def by_drawn_id(self, logits: torch.Tensor) -> torch.Tensor:
        """A model's logits [R, V] in the order of drawn ids, minus infinity for what is never drawn: a copy."""
        return logits.index_select(1, self._columns).masked_fill_(self._lacks, -torch.inf)
