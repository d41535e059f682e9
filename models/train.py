"""Train the pair that ships: ``python models/train.py --minutes 60 --threads 2 --out models``.

Runs on a CPU; a compiler is needed (the layers go through torch.compile).
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from training import architectures, checkpoints, phases
from training.batches import encode_files
from training.clock import Phase
from training.corpus import read_corpus
from training.prompts import build_prompts
from training.tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerFast

COTRAIN_SHARE = 0.68  # of the budget
SAMPLE_SHARE = 0.08  # of what is left then; distillation gets the rest
CHECKPOINT_EVERY_S = 300.0

logger = logging.getLogger("models.training")


def main(
    out: Annotated[Path, typer.Option(help="Folder that gets target/ and draft/.")],
    minutes: Annotated[float, typer.Option(help="Wall-clock budget of the three phases together.")] = 60.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    distil_only: Annotated[bool, typer.Option(help="Keep OUT's target; train its draft on.")] = False,
) -> None:
    """Train tokenizer, target and draft, and save them in bfloat16."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(threads)
    files = read_corpus()
    train_files = [file for file in files if not file.is_validation]
    if distil_only:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
        target = checkpoints.load_for_training(out / "target", seed=0)
        draft = checkpoints.load_for_training(out / "draft", seed=0)
    else:
        tokenizer = train_tokenizer(file.text for file in train_files)
        target = architectures.build(architectures.target_config(), seed=0)
        draft = architectures.build(architectures.draft_config(), seed=0)
        prompts = build_prompts([file for file in files if file.is_validation], tokenizer)
        out.mkdir(parents=True, exist_ok=True)
        (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    documents = encode_files(tokenizer, train_files)
    num_tokens = sum(map(len, documents))
    logger.info("%d files, %.2f M tokens", len(documents), num_tokens / 1e6)
    logger.info("target %d, draft %d parameters", target.num_parameters(), draft.num_parameters())

    log: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
        "train_files": len(documents),
        "train_tokens": num_tokens,
    }
    cotrain_s = 0.0 if distil_only else 60 * minutes * COTRAIN_SHARE
    rest_s = 60 * minutes - cotrain_s

    def save_draft() -> None:
        checkpoints.save(draft, tokenizer, out / "draft")

    def save_pair() -> None:
        checkpoints.save(target, tokenizer, out / "target")
        save_draft()

    if not distil_only:
        save_sometimes = _every(CHECKPOINT_EVERY_S, save_pair)
        log["cotrain"] = _log_of(phases.cotrain(target, draft, documents, cotrain_s, save_sometimes))
        save_pair()
    twin = checkpoints.plain_copy(target)
    target.load_state_dict(twin.state_dict())  # the draft learns from the weights as saved
    samples = phases.sample(twin, documents, rest_s * SAMPLE_SHARE)
    log["sampled_sequences"] = len(samples)
    save_sometimes = _every(CHECKPOINT_EVERY_S, save_draft)
    distil_s = rest_s * (1 - SAMPLE_SHARE)
    log["distil"] = _log_of(phases.distil(target, draft, documents, samples, distil_s, save_sometimes))
    save_draft()
    log_name = "training_log_distil.json" if distil_only else "training_log.json"
    (out / log_name).write_text(json.dumps(log, indent=1) + "\n")
    logger.info("done")


def _every(seconds: float, action: Callable[[], None]) -> Callable[[float], None]:
    """Return a function of the time elapsed that runs ``action`` once in ``seconds``."""
    due = seconds

    def checkpoint(elapsed_s: float) -> None:
        nonlocal due
        if elapsed_s >= due:
            due += seconds
            action()

    return checkpoint


def _log_of(phase: Phase) -> dict[str, object]:
    """Return a phase's figures for the log, without its private counters."""
    figures = asdict(phase)
    return {key: figures[key] for key in ("seconds", "steps", "tokens", "history")}


if __name__ == "__main__":
    typer.run(main)
