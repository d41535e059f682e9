"""Training texts: the user's prompts with the target's continuations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

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
Outputs = Generator[tuple[int, list[int]]]
"""Numbers of prompts with their outputs, as they are finished."""


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
    numbers: Sequence[int],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> Outputs:
    """The target's continuations of the prompts with these numbers, each with its number when it is finished.

    One has up to `max_tokens` tokens, fewer after an end of sequence. Prompt i has the seed `seed` + i, and the tokens
    equal a service's. Raises TrainingRefused if a prompt does not fit.
    """
    sampler = Sampler(runner.vocab_size, runner.device, native=runner.native_sampling)
    waiting = iter(numbers)
    running: dict[int, _Continued] = {}
    try:
        while True:
            for number in itertools.islice(waiting, AT_ONCE - len(running)):
                prompt = prompts[number]
                if not 0 < len(prompt) < runner.max_model_len - max_tokens:
                    raise TrainingRefused(f"prompt {number} of {len(prompt)} tokens does not fit the target's context")
                params = SamplingParams(temperature=temperature, seed=seed + number, max_tokens=max_tokens)
                seq = engine.add(prompt, num_prompt_tokens=len(prompt))
                running[seq.seq_id] = _Continued(number, seq, RowContext(params, len(prompt), len(prompt)), [])
            if not running:
                return
            out = engine.step()
            if out is None:
                raise TrainingRefused("the target's KV cache has no room for the prompts")
            grown = [(running[item.seq.seq_id], item.rows.stop - 1) for item in out.items if item.completes]
            if not grown:
                continue
            rows = [one.row._replace(position=len(one.seq.token_ids)) for one, _ in grown]
            best = sampler.candidates(out.logits[[row for _, row in grown]], rows, 1)
            for (one, _), candidates in zip(grown, best, strict=True):
                token = candidates[0].token_id
                one.output.append(token)
                if token in runner.eos_token_ids or len(one.output) == max_tokens:
                    engine.free(one.seq)
                    del running[one.seq.seq_id]
                    yield one.number, one.output
                else:
                    engine.append(one.seq, [token])
    finally:
        for one in running.values():
            engine.free(one.seq)


@dataclass(frozen=True, slots=True)
class _Continued:
    number: int
    seq: EngineSequence
    row: RowContext
    output: list[int]
