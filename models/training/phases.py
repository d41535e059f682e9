"""The three phases: co-training, samples from the target, distillation of the draft alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .batches import Tokens, windows
from .clock import Phase, warmup_stable_decay
from .losses import compiled_cotraining_loss, compiled_distillation_loss
from .optimizer import SplitOptimizer
from .tokenizer import BOS_ID, EOS_ID, PAD_ID

SHORT, LONG = (16, 512), (8, 1024)  # (sequences, tokens) of a step of co-training
DISTIL = (8, 512)  # of a step of distillation: the draft gains more from many steps than from large ones
LONG_FROM = 0.80  # share of its time after which sequences are long
CUT_PROBABILITY = 0.5  # of a window starting with bos, as a prompt does


def _hidden(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)


def _with_bos(batch: Tensor, generator: np.random.Generator) -> Tensor:
    """Let some windows start with bos, so that a prompt cut from mid-file is nothing new."""
    cut = torch.from_numpy(generator.random(len(batch)) < CUT_PROBABILITY)
    batch[cut, 0] = BOS_ID
    return batch


def cotrain(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    documents: list[Tokens],
    seconds: float,
    checkpoint: Callable[[float], None],
) -> Phase:
    """Train the target on the text and the draft on the target's distributions, in one loop.

    The target's forward pass is there anyway, so its full distribution costs the draft little.
    The draft's learning rate stays up: it decays in ``distil``. ``checkpoint`` gets the seconds
    elapsed after every step.
    """
    target_optimizer = SplitOptimizer(target, matrix_lr=0.02, vector_lr=3e-3, weight_decay=0.05)
    draft_optimizer = SplitOptimizer(draft, matrix_lr=0.02, vector_lr=4e-3, weight_decay=0.02)
    generator = np.random.default_rng(1)
    short, long = windows(documents, *SHORT, seed=2), windows(documents, *LONG, seed=3)
    phase = Phase("co-train", seconds)
    while phase.fraction < 1.0:
        batch = _with_bos(next(short if phase.fraction < LONG_FROM else long), generator)
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        with torch.autocast("cpu", torch.bfloat16):
            target_ce, divergence, draft_ce = compiled_cotraining_loss(
                _hidden(target, inputs),
                target.lm_head.weight.bfloat16(),
                _hidden(draft, inputs),
                draft.lm_head.weight.bfloat16(),
                labels,
            )
        (target_ce + divergence + 0.1 * draft_ce).backward()
        target_optimizer.step(warmup_stable_decay(phase.fraction, warmup=0.02, decay_from=0.45))
        draft_optimizer.step(warmup_stable_decay(phase.fraction, warmup=0.02, decay_from=1.0))
        phase.record(labels.numel(), target_ce=target_ce.item(), kl=divergence.item(), draft_ce=draft_ce.item())
        checkpoint(phase.elapsed)
    return phase


@torch.inference_mode()
def sample(target: LlamaForCausalLM, documents: list[Tokens], seconds: float) -> list[Tokens]:
    """Return continuations by the target of training prompts, half greedy, half at temperature 1.

    ``target`` is an uncompiled copy in bfloat16. Each row is bos, a prompt of 160 tokens, and 352
    tokens of the target's own; eos is never sampled, so that rows have one length.
    """
    num_sequences, num_prompt, length = 96, 160, DISTIL[1] + 1
    prompts = windows(documents, num_sequences, num_prompt - 1, seed=4)
    torch.manual_seed(5)
    phase = Phase("sample", seconds)
    rows: list[Tokens] = []
    while phase.fraction < 1.0 or not rows:
        tokens = next(prompts)
        tokens[:, 0] = BOS_ID
        greedy = torch.arange(num_sequences) % 2 == 0
        output = target(input_ids=tokens, use_cache=True, logits_to_keep=1)
        while tokens.shape[1] < length:
            logits = output.logits[:, -1].float()
            logits[:, [BOS_ID, EOS_ID, PAD_ID]] = float("-inf")
            drawn = logits.softmax(-1).multinomial(1)[:, 0]
            chosen = torch.where(greedy, logits.argmax(-1), drawn)
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            output = target(input_ids=chosen[:, None], past_key_values=output.past_key_values, use_cache=True)
        rows.extend(tokens.numpy().astype(np.uint16))
        phase.record(num_sequences * (length - num_prompt))
    return rows


def _mixed(documents: list[Tokens], samples: list[Tokens]) -> Iterator[Tensor]:
    """Yield batches of which six in eight rows are text and two the target's samples."""
    generator = np.random.default_rng(6)
    num_sequences, length = DISTIL
    num_samples = num_sequences // 4
    text = windows(documents, num_sequences - num_samples, length, seed=7)
    while True:
        chosen = generator.choice(len(samples), num_samples, replace=len(samples) < num_samples)
        own = torch.from_numpy(np.stack([samples[i] for i in chosen]).astype(np.int64))
        yield torch.cat([_with_bos(next(text), generator), own])


def distil(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    documents: list[Tokens],
    samples: list[Tokens],
    seconds: float,
    checkpoint: Callable[[float], None],
) -> Phase:
    """Train the draft on the frozen target's distributions, over text and the target's samples."""
    optimizer = SplitOptimizer(draft, matrix_lr=0.01, vector_lr=2e-3, weight_decay=0.0)
    batches = _mixed(documents, samples)
    phase = Phase("distil", seconds)
    while phase.fraction < 1.0:
        inputs = next(batches)[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target_hidden = _hidden(target, inputs)
            divergence, variation, greedy = compiled_distillation_loss(
                target_hidden,
                target.lm_head.weight.detach().bfloat16(),
                _hidden(draft, inputs),
                draft.lm_head.weight.bfloat16(),
            )
        (divergence + variation + 0.25 * greedy).backward()
        optimizer.step(warmup_stable_decay(phase.fraction, warmup=0.0, decay_from=0.45))
        phase.record(inputs.numel(), kl=divergence.item(), tv=variation.item(), greedy_ce=greedy.item())
        checkpoint(phase.elapsed)
    return phase
