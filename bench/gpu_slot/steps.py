"""The steps of a slot. Each is a process: ``python -m bench.gpu_slot.steps NAME --out FILE [--dry]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from bench.gpu_slot import models
from bench.gpu_slot.attending import attention
from bench.gpu_slot.determinism import (
    adjusting_rows,
    bitwise,
    num_adjusted_that_differ,
    num_cuts_that_differ,
    products,
)
from bench.gpu_slot.models import Found, Place, SlotModel
from bench.gpu_slot.services import failover, gaps, inflated, inflated_32b, loaded, served
from bench.gpu_slot.watched import sanitizer
from specdec.engine.cuda.buckets import ROW_BUCKETS, BucketedSteps
from specdec.engine.cuda.cuts import cut_parameters, launch_cuts
from specdec.engine.cuda.passes import CudaCapture
from specdec.engine.cuda.sampling import device_perturbed_top, launch_top, row_parameters
from specdec.engine.drawing.adjustments import Adjustments
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import DrawRow, DrawRule
from specdec.engine.sampling.noise import Purpose, noise_key
from specdec.engine.sampling.perturbed_top import perturbed_top
from specdec.engine.sampling.sampler import Sampler
from specdec.sampling_params import SamplingParams

LEAST_CONTEXT = 8
"""Where attention costs a step next to nothing."""
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "grpcio", "protobuf", "pydantic", "numpy")


def versions(place: Place) -> Found:
    """What is installed, and on what."""
    found: Found = {"python": sys.version}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        found |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "sms": properties.multi_processor_count,
        }
    return found


def exactness(place: Place) -> Found:
    """Tokens and scores of the device's sampling against the CPU's; raises where a token differs."""
    num_rows, vocab_size = (3, 3000) if place.dry else (64, 128256)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    temperatures = [(0.0, 0.7, 1.0)[row % 3] for row in range(num_rows)]
    keys = [part for row in range(num_rows) for part in noise_key(row, 0, Purpose.PLAIN, row)]
    expected = perturbed_top(logits, temperatures, keys, 4)
    ids, scores = device_perturbed_top(logits.to(place.device), temperatures, keys, 4)
    found = {
        "tokens": len(ids),
        "tokens_that_differ": sum(a != b for a, b in zip(ids, expected[0], strict=True)),
        "scores_that_differ": sum(a != b for a, b in zip(scores, expected[1], strict=True)),
    }
    found["cuts_that_differ"] = num_cuts_that_differ(place, logits[:8])
    found["adjusted_that_differ"] = num_adjusted_that_differ(place, logits[:8])
    place.keep(found)
    if found["tokens_that_differ"] or found["cuts_that_differ"] or found["adjusted_that_differ"]:
        raise AssertionError(found)
    return found


def graph(place: Place) -> Found:
    """Replays of captured steps against eager ones; raises where a bit differs or a replay waits for the device."""
    model = models.make("1b", place, 64 if place.dry else 2048)
    found: Found = {}
    context = 32 if place.dry else 1024
    model.decoder(model.rows(0, context), model.cache)
    replays = _replays(place, model)
    for rows in (1, 2) if place.dry else (1, 7, 8, 64):
        batch = model.rows(context - rows, rows)
        began_s = time.monotonic()
        replays(batch, model.cache)
        found[f"{rows} rows: capture s"] = round(time.monotonic() - began_s, 2)
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        replayed = replays(batch, model.cache)
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        same = bool(torch.equal(replayed, model.decoder(batch, model.cache)))
        found[f"{rows} rows: equal bits"] = same
        place.keep(found)
        if not same and rows in ROW_BUCKETS:  # products of padded rows may be others
            raise AssertionError(found)
    if replays.num_graphs == 0:
        raise AssertionError("no step was captured")
    return found


def _replays(place: Place, model: SlotModel) -> BucketedSteps:
    """The model's steps in buckets; without a GPU a replay runs the step again."""
    steps = BucketedSteps(model.decoder, CudaCapture() if place.device.type == "cuda" else _Rerun())
    steps.serve(model.cache)
    return steps


class _Rerun:
    """``Capture`` without a GPU."""

    def held_bytes(self) -> int:
        """Nothing is kept."""
        return 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """What was captured is run again."""
        logits = run()

        def replay() -> None:
            logits.copy_(run())

        return replay, logits


def steps(place: Place) -> Found:
    """Times of a step, eager and replayed, of 8B and 1B shapes at several contexts."""
    found: Found = {}
    contexts = (16, 32) if place.dry else (256, 1024, 4096)
    for name, shape, is_ordered in (("1b", "1b", False), ("8b", "8b", False), ("8b deterministic", "8b", True)):
        model = models.make(shape, place, contexts[-1] + 512, row_invariant=is_ordered)
        replays = _replays(place, model)
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
    vocab_size = 3000 if place.dry else 128256
    logits = torch.randn(8, vocab_size, device=place.device)
    parameters = row_parameters([1.0] * 8, list(range(16))).to(place.device)
    found["sampling of 8 rows ms"] = place.device_ms(lambda: launch_top(logits, parameters, 4))
    words, kinds = cut_parameters([1.0] * 8, ([40] * 8, [0.9] * 8, [-3.0] * 8), vocab_size)
    words = words.to(place.device)
    found["cuts of 8 rows ms"] = place.device_ms(lambda: launch_cuts(logits, words, kinds))
    adjustments = Adjustments(8, vocab_size, place.device)
    adjustments.fill(adjusting_rows(8))
    found["adjustments of 8 rows ms"] = place.device_ms(lambda: adjustments.adjusted(logits, 0))
    return found


def _prefill(place: Place, model: SlotModel, num_tokens: int) -> None:
    """A prompt in chunks, of which the last token's logits are wanted."""
    chunk = 16 if place.dry else 512
    for start in range(0, num_tokens, chunk):
        batch = model.rows(start, min(chunk, num_tokens - start), num_tokens)
        model.decoder(replace(batch, logits_indices=batch.logits_indices[-1:]), model.cache)


def draft(place: Place) -> Found:
    """Eight tokens one after the other, each computed and drawn on the device without a word from the host."""
    model = models.make("1b", place, 64 if place.dry else 2048)
    context, num_tokens = (16, 2) if place.dry else (1024, 8)
    batches = [model.rows(context + i, 1, context + num_tokens) for i in range(num_tokens)]
    rows = row_parameters([1.0], [1, 2]).to(place.device)

    def run() -> None:
        for i, batch in enumerate(batches):
            drawn = launch_top(model.decoder(batch, model.cache), rows, 1)
            if i + 1 < num_tokens:
                batches[i + 1].input_ids.copy_(drawn[0, 0])

    found: Found = {"tokens": num_tokens, "eager ms": place.median_ms(run)}
    sampler = Sampler(model.vocab_size, place.device)
    drawing = DeviceDrawing(_replays(place, model), model.cache, model.vocab_size, 64 if place.dry else 2048, sampler)
    rule = DrawRule(SamplingParams(seed=1, max_tokens=99, temperature=1.0))
    blocks = array("i", range(model.cache.num_blocks - 1))
    logits = model.decoder(batches[0], model.cache)
    for num_rows in (1,) if place.dry else (1, 4):
        row = DrawRow(rule, 0, context, num_tokens, blocks)
        found[f"{num_rows} rows, graph ms"] = place.median_ms(partial(drawing.draw, [row] * num_rows, logits, 2))
    [adjusting] = adjusting_rows(1)
    row = DrawRow(DrawRule(adjusting.params), 0, context, num_tokens, blocks, adjusting=adjusting)
    found["1 row with penalties, graph ms"] = place.median_ms(partial(drawing.draw, [row], logits, 2))
    return found


def trace(place: Place) -> Found:
    """Where the time of a step of the 8B shape goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    model = models.make("8b", place, 64 if place.dry else 2048)
    batch = model.rows(16, 1) if place.dry else model.rows(1024, 8)
    model.decoder(batch, model.cache)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if place.device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        model.decoder(batch, model.cache)
        place.synchronize()
    order = "cuda_time_total" if place.device.type == "cuda" else "cpu_time_total"
    return {"table": profiler.key_averages().table(sort_by=order, row_limit=25).splitlines()}


STEPS: dict[str, Callable[[Place], Found]] = {
    step.__name__: step
    for step in (
        versions,
        exactness,
        attention,
        sanitizer,
        bitwise,
        graph,
        products,
        steps,
        draft,
        served,
        failover,
        gaps,
        trace,
        inflated,
        loaded,
        inflated_32b,
    )
}


@torch.inference_mode()
def main() -> int:
    """Run one step and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here: --dry runs the same steps without one")

    def keep(found: Found) -> None:
        options.out.write_text(json.dumps(found))

    keep(STEPS[options.step](Place(torch.device("cpu" if options.dry else "cuda:0"), options.dry, keep)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
