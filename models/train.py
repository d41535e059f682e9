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
from training.induction import plant_induction_head
from training.prompts import build_prompts
from training.tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerFast

TARGET_SHARE = 0.65  # of the budget
SAMPLE_SHARE = 0.12  # of what is left then; distillation gets the rest
CHECKPOINT_EVERY_S = 300.0

logger = logging.getLogger("models.training")


def main(
    out: Annotated[Path, typer.Option(help="Folder that gets target/ and draft/.")],
    minutes: Annotated[float, typer.Option(help="Wall-clock budget of the three phases together.")] = 60.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    keep_target: Annotated[bool, typer.Option(help="Keep OUT's target and train a new draft.")] = False,
) -> None:
    """Train tokenizer, target and draft, and save them in bfloat16."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(threads)
    files = read_corpus()
    train_files = [file for file in files if not file.is_validation]
    if keep_target:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
        target = checkpoints.load_for_training(out / "target", seed=0)
    else:
        tokenizer = train_tokenizer(file.text for file in train_files)
        target = architectures.build(architectures.target_config(), seed=0)
        prompts = build_prompts([file for file in files if file.is_validation], tokenizer)
        out.mkdir(parents=True, exist_ok=True)
        (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    draft = architectures.build(architectures.draft_config(), seed=0)
    plant_induction_head(draft)
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
    target_share = 0.0 if keep_target else TARGET_SHARE
    budget_s = 60 * minutes * (1 - target_share)
    if not keep_target:
        save_target = _every(CHECKPOINT_EVERY_S, lambda: checkpoints.save(target, tokenizer, out / "target"))
        log["target"] = _log_of(phases.train_target(target, documents, 60 * minutes * target_share, save_target))
        checkpoints.save(target, tokenizer, out / "target")

    twin = checkpoints.plain_copy(target)
    target.load_state_dict(twin.state_dict())  # the draft learns from the weights as saved
    samples = phases.sample(twin, documents, budget_s * SAMPLE_SHARE)
    log["sampled_sequences"] = len(samples)
    save_draft = _every(CHECKPOINT_EVERY_S, lambda: checkpoints.save(draft, tokenizer, out / "draft"))
    phase = phases.distil(target, draft, documents, samples, budget_s * (1 - SAMPLE_SHARE), save_draft)
    log["draft"] = _log_of(phase)
    checkpoints.save(draft, tokenizer, out / "draft")
    log_name = "training_log_draft.json" if keep_target else "training_log.json"
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
