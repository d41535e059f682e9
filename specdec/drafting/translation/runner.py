"""Forward passes of a draft, asked for and answered by joint ids."""

from __future__ import annotations

import torch

from specdec.drafting.translation.shared import SharedVocabulary
from specdec.engine.batch import Batch
from specdec.engine.runner import Runner


class TranslatingRunner:
    """A runner whose ids are joint ids: see `specdec.drafting.translation.shared`.

    Guarantee: a row's logits are those of the runner below for the draft's own ids, in another order, and minus
    infinity for what the draft does not have.
    """

    def __init__(self, runner: Runner, vocabulary: SharedVocabulary, num_columns: int, device: torch.device) -> None:
        """`num_columns`: of the logits, the joint ids from 0 on; `device`: where logits are."""
        self._runner = runner
        self._inputs = torch.tensor(vocabulary.inputs, dtype=torch.int64, device=runner.device)
        columns = torch.tensor(vocabulary.columns[:num_columns], dtype=torch.int64, device=device)
        self._lacks = columns < 0
        self._columns = columns.clamp(min=0)

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""
        return self._runner.device

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, num_columns] float32 by joint id; the batch's ids become the draft's. Cost: a copy of them."""
        batch.input_ids = self._inputs[batch.input_ids]
        logits = self._runner.forward(batch).index_select(1, self._columns)
        return logits.masked_fill_(self._lacks, -torch.inf)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order."""
        self._runner.copy_blocks(pairs)

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy physical slots in all layers."""
        self._runner.copy_slots(src, dst)
