"""Forward passes of a draft over joint ids."""

from __future__ import annotations

import torch

from specdec.drafting.translation.shared import SharedVocabulary
from specdec.engine.batch import Batch
from specdec.engine.drawing.rows import IdTables, OtherIds
from specdec.engine.runner import Runner


def drawn_ids(vocabulary: SharedVocabulary, num_drawn: int) -> OtherIds:
    """Tables of the joint ids, of which the first `num_drawn` have logits."""
    return OtherIds(vocabulary.inputs, vocabulary.columns[:num_drawn])


class TranslatingRunner:
    """A runner whose ids are joint ids (`specdec.drafting.translation.shared`).

    Guarantee: a row's logits are the inner runner's logits by joint id, and minus infinity for tokens that the draft
    lacks.
    """

    def __init__(self, runner: Runner, vocabulary: SharedVocabulary, num_drawn: int, device: torch.device) -> None:
        """`num_drawn`: columns of the logits, joint ids 0 and up; `device`: of the logits."""
        self._runner = runner
        self._ids = IdTables(drawn_ids(vocabulary, num_drawn), runner.device, device)

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self._runner.device

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, num_drawn] float32 by joint id. Replaces the batch's ids by the draft's. Cost: a copy of the
        logits.
        """
        batch.input_ids = self._ids.model_ids(batch.input_ids)
        return self._ids.by_drawn_id(self._runner.forward(batch))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order."""
        self._runner.copy_blocks(pairs)

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy physical slots in all layers."""
        self._runner.copy_slots(src, dst)
