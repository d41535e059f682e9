"""Forward passes of a draft, asked for and answered by joint ids."""

from __future__ import annotations

import torch

from specdec.drafting.translation.shared import SharedVocabulary
from specdec.engine.batch import Batch
from specdec.engine.drawing.rows import IdTables, OtherIds
from specdec.engine.runner import Runner


def drawn_ids(vocabulary: SharedVocabulary, num_drawn: int) -> OtherIds:
    """Joint ids of which the first are drawn: all of the target's, say."""
    return OtherIds(vocabulary.inputs, vocabulary.columns[:num_drawn])


class TranslatingRunner:
    """A runner whose ids are joint ids: see `specdec.drafting.translation.shared`.

    Guarantee: a row's logits are those of the runner below for the draft's own ids, in another order, and minus
    infinity for what the draft does not have.
    """

    def __init__(self, runner: Runner, vocabulary: SharedVocabulary, num_drawn: int, device: torch.device) -> None:
        """`num_drawn`: of the logits, the joint ids from 0 on; `device`: where logits are."""
        self._runner = runner
        self._ids = IdTables(drawn_ids(vocabulary, num_drawn), runner.device, device)

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""
        return self._runner.device

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, num_drawn] float32 by joint id; the batch's ids become the draft's. Cost: a copy of them."""
        batch.input_ids = self._ids.model_ids(batch.input_ids)
        return self._ids.by_drawn_id(self._runner.forward(batch))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order."""
        self._runner.copy_blocks(pairs)

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy physical slots in all layers."""
        self._runner.copy_slots(src, dst)
