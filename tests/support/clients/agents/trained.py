"""Models that say the ten turns, trained in seconds over the tokenizer and chat template of a published model.

A model attends to the last few dozen tokens only, so that its answer depends on the last message, whichever client
wrote the history. Tokens that no turn has are zero vectors: their logit is 0, and those of the answers are above.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from tests.support.clients.agents.turns import NAME, TOOL, TURNS, WriteCall, asked_last, result_of

_WINDOW = 40
"""Tokens that a layer attends to."""
_MOST_STEPS = 600
_STEPS_UNTIL_SLOW = 150
_STEPS_PER_CHECK = 10
_LEAST_MARGIN = 5.0
"""Distance of the right token's logit from the next one, in each of `_CHECKS` fresh batches in turn."""
_CHECKS = 3
_LEAST_TAIL = 18
"""Tokens at a prompt's end that have all of the last message that its answer depends on."""
_IGNORED = -100
_POSITIONS = 16384


@dataclass(frozen=True, slots=True)
class Trained:
    """A model's folder."""

    folder: Path
    cut_tokens: int
    """Tokens after which the answer to be cut ends within a call's arguments."""


def train(source: Path, folder: Path, write: WriteCall) -> Trained:
    """Train a model, and write it to `folder` with the tokenizer of `source`.

    Args:
        source: has tokenizer.json and tokenizer_config.json.
        folder: new.
        write: writes a call as the template does.

    Raises:
        AssertionError: the model did not learn the turns.
    """
    torch.manual_seed(0)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source)
    examples = [
        example
        for tools, keeps_thoughts in itertools.product(([TOOL], None), (True, False))
        for example in _examples(tokenizer, write, tools, keeps_thoughts=keeps_thoughts)
    ]
    used = sorted({token for prompt, answer in examples for token in (*prompt, *answer)})
    small = _fitted(examples, {token: number for number, token in enumerate(used, 1)})
    config = _config(len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)
    model = MistralForCausalLM(config)
    weights = small.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        spread = torch.zeros(len(tokenizer), config.hidden_size)
        spread[used] = weights[name][1:]
        weights[name] = spread
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    [cut] = [turn.cut(write) for turn in TURNS if turn.option == "cut"]
    return Trained(folder, len(tokenizer.encode(cut, add_special_tokens=False)))


def _examples(
    tokenizer: Any, write: WriteCall, tools: list[Any] | None, *, keeps_thoughts: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of each turn's prompt and answer, with a history as some client writes it."""
    messages: list[dict[str, Any]] = []
    for number, (turn, last) in enumerate(zip(TURNS, asked_last(), strict=True)):
        if turn.user:
            messages.append({"role": "user", "content": last})
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(turn.written(write), add_special_tokens=False)
        yield prompt, [*answer, tokenizer.eos_token_id]
        calls = [
            {"id": f"c{number}x{at}", "type": "function", "function": {"name": NAME, "arguments": dict(arguments)}}
            for at, arguments in enumerate(turn.calls)
        ]
        thoughts = {"reasoning_content": turn.thoughts} if keeps_thoughts and turn.thoughts else {}
        said = {"role": "assistant", "content": turn.says, **thoughts}
        messages.append(said | ({"tool_calls": calls} if calls else {}))
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "name": NAME, "content": result_of(arguments)}
            for call, arguments in zip(calls, turn.answer.calls, strict=True)
        ]


def _config(vocab_size: int, **more: Any) -> MistralConfig:
    return MistralConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_POSITIONS,
        sliding_window=_WINDOW,
        tie_word_embeddings=False,
        **more,
    )


def _fitted(examples: list[tuple[list[int], list[int]]], numbers: Mapping[int, int]) -> Any:
    """A model over the used tokens only; 0 stands for all others."""
    model: Any = MistralForCausalLM(_config(len(numbers) + 1, pad_token_id=0))
    with torch.no_grad():
        model.lm_head.weight[0] = 0
        model.model.embed_tokens.weight[0] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=_STEPS_UNTIL_SLOW)
    rng, num_passed = random.Random(0), 0
    for step in range(_MOST_STEPS):
        ids, labels = _batch(examples, numbers, rng)
        logits = model(ids).logits[:, :-1]
        wanted = labels[:, 1:]
        chosen = logits[wanted != _IGNORED]
        targets = wanted[wanted != _IGNORED]
        if num_passed or step % _STEPS_PER_CHECK == 0:
            num_passed = num_passed + 1 if _margin(chosen.detach(), targets) > _LEAST_MARGIN else 0
            if num_passed == _CHECKS:
                return model
        loss = torch.nn.functional.cross_entropy(chosen, targets)
        optimizer.zero_grad()
        loss.backward()
        model.lm_head.weight.grad[0] = 0
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()
    raise AssertionError(f"the turns are not learnt in {_MOST_STEPS} steps")


def _margin(logits: torch.Tensor, targets: torch.Tensor) -> float:
    right = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], float("-inf")).amax(1)
    return float((right - others).min())


def _batch(
    examples: list[tuple[list[int], list[int]]], numbers: Mapping[int, int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each turn behind the end of its history, and behind histories that no client has."""
    rows = []
    told = [numbers[token] for prompt, answer in examples for token in (*prompt, *answer)]
    for prompt, answer in examples:
        tail = [numbers[token] for token in prompt[-rng.randint(_LEAST_TAIL, 3 * _WINDOW) :]]
        at = rng.randrange(len(told))
        noise = [token if rng.random() < 0.9 else 0 for token in told[at : at + rng.randint(0, 2 * _WINDOW)]]
        rows.append((noise + tail, [numbers[token] for token in answer]))
    length = max(len(before) + len(answer) for before, answer in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), _IGNORED)
    for row, (before, answer) in enumerate(rows):
        end = len(before) + len(answer)
        ids[row, :end] = torch.tensor(before + answer)
        labels[row, len(before) : end] = torch.tensor(answer)
    return ids, labels
