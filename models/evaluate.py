"""Measure the pair on held-out files: ``python models/evaluate.py --models models``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import torch
import typer
from training.agreement import ChainFigures, TextFigures, along_continuation, continue_text, over_text, repeated_share
from training.batches import encode_files
from training.corpus import read_corpus
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

logger = logging.getLogger("models.evaluate")


def main(
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.json.")],
    out: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    num_new: Annotated[int, typer.Option(help="Tokens to continue each prompt by.")] = 128,
    length: Annotated[int, typer.Option(help="Window of the teacher-forced part.")] = 512,
    max_windows: Annotated[int, typer.Option(help="Use only the first windows of each file.")] = 1000,
) -> None:
    """Print perplexities, greedy agreement by position and overlap, in float32."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models / "target")
    target = LlamaForCausalLM.from_pretrained(models / "target", dtype=torch.float32).eval()
    draft = LlamaForCausalLM.from_pretrained(models / "draft", dtype=torch.float32).eval()
    held_out = [file for file in read_corpus() if file.is_validation]
    figures: dict[str, object] = {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
    }
    for name, is_test in (("library", False), ("tests", True)):
        documents = encode_files(tokenizer, [file for file in held_out if file.is_test == is_test])
        shortened = [document.tolist()[: max_windows * length] for document in documents]
        figures[f"held_out_{name}"] = over_text(target, draft, shortened, length).means()
        logger.info("held-out %s: %s", name, figures[f"held_out_{name}"])
    prompts = json.loads((models / "prompts.json").read_text())
    for temperature in (0.0, 1.0):
        text, chains = TextFigures(), ChainFigures()
        repeated = []
        for seed, prompt in enumerate(prompts):
            ids = tokenizer(prompt["text"]).input_ids
            tokens = continue_text(target, ids, num_new, temperature, seed)
            repeated.append(repeated_share(tokens, len(ids)))
            along_continuation(target, draft, tokens, len(ids), text, None if temperature else chains)
        name = f"own_text_temperature_{temperature:.0f}"
        looping = {"repeated_share": round(sum(repeated) / len(repeated), 4)}
        figures[name] = text.means() | looping | ({} if temperature else chains.means())
        logger.info("%s: %s", name, figures[name])
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
