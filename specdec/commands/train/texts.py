"""Training texts: the user's prompts with the target's continuations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specdec.commands.train.recipe import TrainingRefused
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.wire.sampling_params import SamplingParams

AT_ONCE = 32
"""Continuations that run at once."""
_HELD_OUT_EVERY = 10

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with the target's continuation."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    temperature: float
    is_held_out: bool
    """Whether it is used for measuring only."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids


def is_held_out(number: int) -> bool:
    """Whether the prompt of this number is held out if the user names no held-out prompts: every tenth."""
    return number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


def continuations(
    engine: Engine,
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    tell: Tell,
) -> list[list[int]]:
    """The target's continuation of each prompt: up to `max_tokens` tokens, fewer after an end of sequence.

    Prompt i has the seed `seed` + i, and the tokens equal a service's. Raises TrainingRefused if a prompt does not fit.
    """
    sampler = Sampler(runner.vocab_size, runner.device)
    outputs: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(prompts), AT_ONCE):
        tell(f"continuations at temperature {temperature:g}: {first} of {len(prompts)}")
        numbers = range(first, min(first + AT_ONCE, len(prompts)))
        running: dict[int, tuple[int, SamplingParams, EngineSequence]] = {}
        for number in numbers:
            prompt = prompts[number]
            if not 0 < len(prompt) < runner.max_model_len - max_tokens:
                raise TrainingRefused(f"prompt {number} of {len(prompt)} tokens does not fit the target's context")
            params = SamplingParams(temperature=temperature, seed=seed + number, max_tokens=max_tokens)
            seq = engine.add(prompt, num_prompt_tokens=len(prompt))
            running[seq.seq_id] = (number, params, seq)
        while running:
            out = engine.step()
            if out is None:
                raise TrainingRefused("the target's KV cache has no room for the prompts")
            for item in out.items:
                if not item.completes:
                    continue
                number, params, seq = running[item.seq.seq_id]
                row = RowContext(params, len(seq.token_ids), len(prompts[number]))
                token = sampler.candidates(out.logits[item.rows.stop - 1 : item.rows.stop], [row], 1)[0][0].token_id
                outputs[number].append(token)
                if token in runner.eos_token_ids or len(outputs[number]) == max_tokens:
                    engine.free(seq)
                    del running[seq.seq_id]
                else:
                    engine.append(seq, [token])
    return outputs


def save_texts(path: Path, texts: Sequence[Text], origin: dict[str, object]) -> None:
    """Write texts and their origin atomically."""
    content = {"origin": origin, "texts": [asdict(text) for text in texts]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)


def read_texts(path: Path, origin: dict[str, object]) -> list[Text] | None:
    """Read the file of `save_texts`; None if there is none. Raises TrainingRefused for another origin."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["origin"] != origin:
        raise TrainingRefused(f"{path.parent} holds a run over other texts: name another folder, or remove it")
    return [
        Text(tuple(each["prompt_ids"]), tuple(each["output_ids"]), each["temperature"], each["is_held_out"])
        for each in content["texts"]
    ]
