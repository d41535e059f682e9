"""Steps of the slot that time the engine: passes, sampling, and drafts of several tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial

import torch

from bench.gpu_slot import models
from bench.gpu_slot.determinism import adjusting_rows
from bench.gpu_slot.models import COPIES, Found, SlotModel, StepSetup
from bench.gpu_slot.predicted import predicted_steps
from specdec.engine.cuda.cuts import cut_parameters, launch_cuts
from specdec.engine.cuda.sampling import launch_top, row_parameters
from specdec.engine.drawing.adjustments import Adjustments
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import DrawRow, DrawRule
from specdec.engine.sampling.sampler import Sampler
from specdec.wire.sampling_params import SamplingParams

LEAST_CONTEXT = 8
"""Tokens of a context whose attention costs next to nothing."""


def steps(place: StepSetup) -> Found:
    """Times of a step, eager and replayed, of 8B and 1B shapes at several contexts, beside the predictions."""
    found: Found = {COPIES: place.copy_tb_per_s()}
    found["predicted"] = {} if place.dry else predicted_steps(torch.cuda.get_device_name())
    contexts = (16, 32) if place.dry else (1024, 4096)
    for name, shape, is_ordered in (("1b", "1b", False), ("8b", "8b", False), ("8b deterministic", "8b", True)):
        model = models.make(shape, place, contexts[-1] + 512, row_invariant=is_ordered)
        replays = models.replays_of(place, model)
        found[f"{name}: weights GB"] = round(model.weight_bytes / 1e9, 2)
        for context in contexts:
            for rows in (1, 8) if place.dry else (1, 8, 64, 512):
                batch = model.rows(context, rows, context + rows)
                label = f"{name}: {rows} rows at {context}"
                found[f"{label}, eager ms"] = place.median_ms(partial(model.decoder, batch, model.cache))
                if rows <= 64:
                    found[f"{label}, graph ms"] = place.median_ms(partial(replays, batch, model.cache))
                place.keep(found)
        for context in (LEAST_CONTEXT, *contexts):
            for rows in (8,) if place.dry else (8, 64):
                batch = model.tree(context, rows, context + rows)
                found[f"{name}: tree of {rows} at {context}, graph ms"] = place.median_ms(
                    partial(replays, batch, model.cache)
                )
        found[f"{name}: prefill of {contexts[-1]}, ms"] = place.median_ms(partial(_prefill, place, model, contexts[-1]))
        place.keep(found)
        del model, replays
    return found | _sampling(place)


def _sampling(place: StepSetup) -> Found:
    """Device times of drawing from the logits of 8 rows, of cutting them, and of adjusting them."""
    vocab_size = 3000 if place.dry else 128256
    logits = torch.randn(8, vocab_size, device=place.device)
    parameters = row_parameters([1.0] * 8, list(range(16))).to(place.device)
    found: Found = {"sampling of 8 rows ms": place.device_ms(lambda: launch_top(logits, parameters, 4))}
    words, kinds = cut_parameters([1.0] * 8, ([40] * 8, [0.9] * 8, [-3.0] * 8), vocab_size)
    words = words.to(place.device)
    found["cuts of 8 rows ms"] = place.device_ms(lambda: launch_cuts(logits, words, kinds))
    adjustments = Adjustments(8, vocab_size, place.device)
    adjustments.fill(adjusting_rows(8))
    found["adjustments of 8 rows ms"] = place.device_ms(lambda: adjustments.adjusted(logits, 0))
    return found


def _prefill(place: StepSetup, model: SlotModel, num_tokens: int) -> None:
    """Prefill a prompt in chunks, with the logits of each chunk's last token."""
    chunk = 16 if place.dry else 512
    for start in range(0, num_tokens, chunk):
        batch = model.rows(start, min(chunk, num_tokens - start), num_tokens)
        model.decoder(replace(batch, logits_indices=batch.logits_indices[-1:]), model.cache)


def long(place: StepSetup) -> Found:
    """Times of an 8B prefill of 32k tokens, and of decoding one long context beside 31 short ones."""
    length, short = (48, 8) if place.dry else (32768, 500)
    model = models.make("8b", place, length + 16)
    found: Found = {f"8b: prefill of {length}, ms": place.median_ms(partial(_prefill, place, model, length), 1)}
    place.keep(found)
    replays = models.replays_of(place, model)
    num_rows = 4 if place.dry else 32
    for name, first in (("short ones only", short), (f"one of {length}", length)):
        batch = models.decoding(model, [first] + [short] * (num_rows - 1))
        found[f"8b: {num_rows} rows, {name}, ms"] = place.median_ms(partial(replays, batch, model.cache))
        place.keep(found)
    return found


def draft(place: StepSetup) -> Found:
    """Times of drafting eight tokens on the device without the host between them: eight passes.

    The first token is drawn from a pass over the context's last token, which counts.
    """
    model = models.make("1b", place, 64 if place.dry else 2048)
    context, num_tokens = (16, 2) if place.dry else (1024, 8)
    batches = [model.rows(context + i, 1, context + num_tokens) for i in range(num_tokens)]
    parameters = row_parameters([1.0], [1, 2]).to(place.device)

    def singly() -> None:
        for i, batch in enumerate(batches):
            drawn = launch_top(model.decoder(batch, model.cache), parameters, 1)
            if i + 1 < num_tokens:
                batches[i + 1].input_ids.copy_(drawn[0, 0])

    found: Found = {"tokens": num_tokens, COPIES: place.copy_tb_per_s(), "eager ms": place.median_ms(singly)}
    replays = models.replays_of(place, model)
    sampler = Sampler(model.vocab_size, place.device)
    drawing = DeviceDrawing(replays, model.cache, model.vocab_size, 64 if place.dry else 2048, sampler)
    blocks = array("i", range(model.cache.num_blocks - 1))

    def drafted(rows: list[DrawRow]) -> None:
        drawn = drawing.draw(rows, replays(model.rows(context, len(rows), context + num_tokens), model.cache), 2)
        if len(drawn[0]) != num_tokens:
            raise AssertionError(f"{len(drawn[0])} tokens were drawn")

    rule = DrawRule(SamplingParams(seed=1, max_tokens=99, temperature=1.0))
    for num_rows in (1,) if place.dry else (1, 4):
        rows = [DrawRow(rule, index, context + 1, num_tokens, blocks) for index in range(num_rows)]
        found[f"{num_rows} rows, graph ms"] = place.median_ms(partial(drafted, rows))
        place.keep(found)
    [adjusting] = adjusting_rows(1)
    row = DrawRow(DrawRule(adjusting.params), 0, context + 1, num_tokens, blocks, adjusting=adjusting)
    found["1 row with penalties, graph ms"] = place.median_ms(partial(drafted, [row]))
    return found
