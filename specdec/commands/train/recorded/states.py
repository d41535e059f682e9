"""The target's hidden states over texts, computed once by its engine and kept in a file; batches of them."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.commands.train.pace import Pace
from specdec.commands.train.recipe import TrainingRefused
from specdec.commands.train.recorded.mapped import MappedTensors, digest_of_texts
from specdec.commands.train.recorded.texts import Tell, Text
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.tap import FINAL

_MAX_DIFFERENCE, _MAX_HALF_DIFFERENCE = 0.05, 1.0
"""Largest differences of log-probabilities, from the engine and from final states, in float32 and in half precision."""


@dataclass(slots=True)
class TextBatch:
    """Texts side by side, padded at the end."""

    token_ids: torch.Tensor
    """[B, T] int64."""
    taps: torch.Tensor
    """[B, T, layers, Ht], states of the layers that the head reads."""
    finals: torch.Tensor
    """[B, T, Ht], input of the target's own head."""
    lengths: torch.Tensor
    """[B] int64, tokens of each text."""
    prompt_lengths: torch.Tensor
    """[B] int64."""


@dataclass(slots=True)
class States:
    """Texts with the states of all their tokens."""

    texts: list[Text]
    layer_ids: tuple[int, ...]
    rows: torch.Tensor
    """[tokens of all texts, layers + 1, Ht], the last layer is `FINAL`; a mapped file."""
    starts: list[int]

    def batch(self, numbers: Sequence[int], device: torch.device) -> TextBatch:
        """A batch of the texts with these numbers."""
        texts = [self.texts[number] for number in numbers]
        lengths = [len(text.token_ids) for text in texts]
        longest = max(lengths)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        rows = self.rows.new_zeros(len(texts), longest, *self.rows.shape[1:])
        for place, (number, text, length) in enumerate(zip(numbers, texts, lengths, strict=True)):
            ids[place, :length] = torch.tensor(text.token_ids)
            rows[place, :length] = self.rows[self.starts[number] : self.starts[number] + length]
        rows = rows.to(device).float()
        return TextBatch(
            ids.to(device),
            rows[:, :, :-1],
            rows[:, :, -1],
            torch.tensor(lengths, device=device),
            torch.tensor([len(text.prompt_ids) for text in texts], device=device),
        )

    def numbers(self, *, held_out: bool, temperature: float | None = None) -> list[int]:
        """Numbers of the held-out or of the other texts; with a temperature, only of texts made at it."""
        return [
            number
            for number, text in enumerate(self.texts)
            if text.is_held_out == held_out and temperature in (None, text.temperature)
        ]


def record_states(
    engine: Engine, runner: ModelRunner, texts: Sequence[Text], layer_ids: tuple[int, ...], folder: Path, tell: Tell
) -> States:
    """States of all texts in the target's dtype, from the files of an earlier call as far as it came.

    Cost: a prefill of each text, and on disk layers + 1 times the hidden size per token. Raises TapRefused if the
    target does not hand out these layers.
    """
    wanted = (*layer_ids, FINAL)
    runner.check_tap(wanted)
    starts, digest = [0, *itertools.accumulate(len(text.token_ids) for text in texts)], digest_of_texts(texts)
    # The final states of a run that also recorded others serve one that needs no more.
    ids = wanted if layer_ids else _recorded_layers(folder, digest, len(texts)) or wanted
    layout = {"rows": ((starts[-1], len(ids), runner.hidden_size), runner.dtype)}
    kept = MappedTensors(folder, "states", layout, {"layer_ids": list(ids), "texts": digest})
    rows = kept.tensors["rows"]
    pace = Pace(len(texts))
    engine.tap_ids = ids
    try:
        for number in kept.unfilled(len(texts)):
            tell(f"hidden states: text {pace.at(number)}")
            _record(engine, texts[number].token_ids, rows[starts[number] : starts[number + 1]])
    finally:
        engine.tap_ids = ()
    return States(list(texts), layer_ids, rows[:, -len(wanted) :], starts)


def _recorded_layers(folder: Path, digest: str, num_texts: int) -> tuple[int, ...]:
    """Layers of the states of these texts that a folder holds, if any."""
    for note in sorted(folder.glob("states-*.json")):
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["origin"]["texts"] == digest and known["num_texts"] == num_texts:
            return tuple(known["origin"]["layer_ids"])
    return ()


def _record(engine: Engine, token_ids: Sequence[int], rows: torch.Tensor) -> None:
    """Fill the rows of one text. Raises TrainingRefused if the engine has no room for it."""
    # A new salt: states are handed out only for computed tokens, and cached ones are not computed.
    seq = engine.add(token_ids, num_prompt_tokens=len(token_ids), cache_salt=secrets.token_bytes(16))
    try:
        while seq.num_pending_tokens:
            out = engine.step()
            if out is None or out.hidden is None:
                raise TrainingRefused("the target's KV cache has no room for a text")
            for item in out.items:
                rows[item.start : item.start + item.num_new_tokens] = out.hidden[item.batch_rows].to("cpu")
    finally:
        engine.free(seq)


def check_logits(engine: Engine, runner: ModelRunner, lm_head: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Check that the target's logits are its final states times `lm_head` [V, Ht], which training assumes.

    Raises TrainingRefused if they are not, as in models that scale or cap logits.
    """
    seq = engine.add(token_ids, num_prompt_tokens=len(token_ids), cache_salt=secrets.token_bytes(16))
    engine.tap_ids = (FINAL,)
    try:
        out = engine.step()
    finally:
        engine.tap_ids = ()
        engine.free(seq)
    if out is None or out.hidden is None:
        raise TrainingRefused("the target's KV cache has no room for a text")
    made = out.hidden[out.items[0].batch_rows][-1, 0].float() @ lm_head.to(out.hidden.device).float().T
    known = out.logits[-1, : runner.vocab_size].log_softmax(-1)
    difference = float((made[: runner.vocab_size].log_softmax(-1) - known).abs().max())
    if difference > (_MAX_DIFFERENCE if runner.dtype == torch.float32 else _MAX_HALF_DIFFERENCE):
        raise TrainingRefused("the target scales or caps its logits, which training does not support")
