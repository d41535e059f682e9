"""Train the pair that ships: ``python models/train.py --minutes 60 --threads 2 --out models``.

Runs on a CPU; a compiler is needed (the layers go through torch.compile).
"""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from training import architectures, checkpoints, phases
from training.batches import encode_files
from training.clock import Phase
from training.corpus import read_corpus
from training.optimizer import SplitOptimizer
from training.prompts import build_prompts
from training.tokenizer import train_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

COTRAIN_SHARE, SAMPLE_SHARE = 0.72, 0.08  # of the budget; the rest is distillation
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

    draft_optimizer = SplitOptimizer(draft, matrix_lr=0.02, vector_lr=4e-3, weight_decay=0.02)
    log: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
        "train_files": len(documents),
        "train_tokens": num_tokens,
    }
    shares = [COTRAIN_SHARE, SAMPLE_SHARE, 1 - COTRAIN_SHARE - SAMPLE_SHARE]
    if distil_only:
        shares = [0.0, *(share / (1 - COTRAIN_SHARE) for share in shares[1:])]
    budget_s = [60 * minutes * share for share in shares]

    def save_pair() -> None:
        checkpoints.save(target, tokenizer, out / "target")
        checkpoints.save(draft, tokenizer, out / "draft")

    if not distil_only:
        next_save_s = CHECKPOINT_EVERY_S

        def checkpoint(elapsed_s: float) -> None:
            nonlocal next_save_s
            if elapsed_s >= next_save_s:
                next_save_s += CHECKPOINT_EVERY_S
                save_pair()

        phase = phases.cotrain(target, draft, draft_optimizer, documents, budget_s[0], checkpoint)
        log["cotrain"] = _log_of(phase)
        save_pair()
    target_twin: LlamaForCausalLM = checkpoints.plain_copy(target)
    target.load_state_dict(target_twin.state_dict())  # the draft learns from the weights as saved
    samples = phases.sample(target_twin, documents, budget_s[1])
    log["sampled_sequences"] = len(samples)
    phase = phases.distil(target, draft, draft_optimizer, documents, samples, budget_s[2])
    log["distil"] = _log_of(phase)
    checkpoints.save(draft, tokenizer, out / "draft")
    log_name = "training_log_distil.json" if distil_only else "training_log.json"
    (out / log_name).write_text(json.dumps(log, indent=1) + "\n")
    logger.info("done")


def _log_of(phase: Phase) -> dict[str, object]:
    """Return a phase's figures for the log, without its private counters."""
    figures = asdict(phase)
    return {key: figures[key] for key in ("seconds", "steps", "tokens", "history")}


if __name__ == "__main__":
    typer.run(main)
