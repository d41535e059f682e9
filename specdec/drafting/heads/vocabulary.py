"""A head's vocabulary, which may be a part of the target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specdec.drafting.heads.checkpoint import HeadRefused


class DraftVocabulary:
    """Maps a head's ids to the target's."""

    def __init__(self, target_ids: torch.Tensor | None, draft_size: int, target_size: int) -> None:
        """`target_ids` [draft_size] int64: the target's id of each of the head's; None: the first `draft_size` ids."""
        self.draft_size = draft_size
        self.target_size = target_size
        self.target_ids = target_ids

    def to(self, device: torch.device) -> DraftVocabulary:
        """A copy on a device."""
        ids = None if self.target_ids is None else self.target_ids.to(device)
        return DraftVocabulary(ids, self.draft_size, self.target_size)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, draft_size] as [R, target_size] float32 over the target's ids.

        Tokens outside the head's vocabulary get minus infinity.
        """
        if self.target_ids is None and self.draft_size == self.target_size:
            return logits.float()
        full = logits.new_full((logits.shape[0], self.target_size), -torch.inf, dtype=torch.float32)
        if self.target_ids is None:
            full[:, : self.draft_size] = logits[:, : self.target_size]
        else:
            full[:, self.target_ids] = logits.float()
        return full


def read_vocabulary(tensors: Mapping[str, torch.Tensor], draft_size: int, target_size: int) -> DraftVocabulary:
    """Read `d2t` (an offset per head id) and check it against `t2d`; without them the ids are the target's.

    Raises HeadRefused for wrong sizes, ids outside the target's vocabulary, ids named twice, or contradictions.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if draft_size != target_size:
            raise HeadRefused(f"tensors missing: d2t, as {draft_size} tokens stand for {target_size}")
        return DraftVocabulary(None, draft_size, target_size)
    if d2t.is_floating_point() or tuple(d2t.shape) != (draft_size,):
        raise HeadRefused(f"d2t is {d2t.dtype} {tuple(d2t.shape)}, not integers for {draft_size} tokens")
    return checked_map(d2t.long() + torch.arange(draft_size), target_size, "d2t", t2d)


def checked_map(
    target_ids: torch.Tensor, target_size: int, name: str, t2d: torch.Tensor | None = None
) -> DraftVocabulary:
    """The vocabulary of these target ids. Raises HeadRefused as `read_vocabulary` does."""
    draft_size = target_ids.shape[0]
    if draft_size and not (int(target_ids.min()) >= 0 and int(target_ids.max()) < target_size):
        raise HeadRefused(f"{name} names tokens outside the target's {target_size}")
    if int(target_ids.unique().numel()) != draft_size:
        raise HeadRefused(f"{name} names a token twice")
    if t2d is not None:
        if tuple(t2d.shape) != (target_size,):
            raise HeadRefused(f"t2d is of shape {tuple(t2d.shape)}, not {(target_size,)}")
        named = torch.zeros(target_size, dtype=torch.bool)
        named[target_ids] = True
        if not torch.equal(named, t2d.bool()):
            raise HeadRefused(f"t2d and {name} do not name the same tokens")
    return DraftVocabulary(target_ids, draft_size, target_size)
