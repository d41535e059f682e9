"""Trial of a head along a target's own answers: its tokens, and the time of its calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from specdec.commands.train.job import Loaded
from specdec.commands.train.layer_ids import LayerVerdict, try_layer_ids
from specdec.config.drafter_options import HeadOptions
from specdec.drafting.heads.methods.registry import make_head
from specdec.drafting.heads.session import Features, Head, HeadAsk, HeadSession
from specdec.drafting.interface import Room
from specdec.engine.errors import EngineError
from specdec.engine.sampling.sampler import RowContext
from specdec.engine.tap import FINAL
from specdec.wire.sampling_params import SamplingParams

_SEED = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """One draft."""

    guessed: int | None
    """Its first token; None: it offered none."""
    actual: int
    """The target's token."""
    elapsed_s: float


def trials(
    loaded: Loaded, head: Head, prompt: Sequence[int], num_tokens: int, *, num_drafted: int, salt: bytes
) -> Iterator[Trial]:
    """Draft a chain of `num_drafted` tokens before each of the target's greedy tokens after a prompt.

    `salt` must be new in every call, because cached tokens hand out no states. Raises EngineError if the engine has no
    room for one sequence.
    """
    engine, runner = loaded.engine, loaded.runner
    params = SamplingParams(temperature=0.0, seed=_SEED, max_tokens=num_tokens)
    seq = engine.add(prompt, num_prompt_tokens=len(prompt), cache_salt=salt)
    session, guess = HeadSession(), None
    engine.tap_ids = head.layer_ids
    try:
        for _ in range(num_tokens + 1):
            actual = 0
            while seq.num_pending_tokens:
                start = seq.num_computed_tokens
                out = engine.step()
                if out is None or out.hidden is None:
                    raise EngineError("the KV cache has no room for a sequence")
                (item,) = out.items
                states = out.hidden[item.batch_rows]
                actual = int(out.logits[item.rows.stop - 1, : runner.vocab_size].argmax()) if item.completes else 0
                after = [*seq.token_ids[start + 1 : start + 1 + len(states)], actual]
                session.take(seq, Features(start, states, after[: len(states)]))
            if guess is not None:
                yield Trial(guess[0], actual, guess[1])
            engine.append(seq, [actual])
            ask = HeadAsk(
                session,
                RowContext(params, len(seq.token_ids), len(prompt)),
                Room(num_drafted, num_drafted),
                is_chain=True,
            )
            began_s = time.perf_counter()
            offer = head.draft([ask])[0]
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            token = offer.token_ids[0] if offer is not None and offer.token_ids else None
            guess = (token, time.perf_counter() - began_s)
    finally:
        engine.tap_ids = ()
        engine.free(seq)


def first_guess_share(
    loaded: Loaded, options: HeadOptions, prompts: Sequence[Sequence[int]], num_tokens: int, salt: bytes = b""
) -> float:
    """Share of a head's first tokens that are the target's greedy ones. Raises HeadRefused, TapRefused, EngineError."""
    head = make_head(options, loaded.for_heads)
    found = [
        trial.guessed == trial.actual
        for number, prompt in enumerate(prompts)
        for trial in trials(loaded, head, prompt, num_tokens, num_drafted=1, salt=b"trial-%d-%s" % (number, salt))
    ]
    return sum(found) / max(1, len(found))


def try_head_layers(
    loaded: Loaded, options: HeadOptions, prompts: Sequence[Sequence[int]], num_tokens: int
) -> LayerVerdict | None:
    """Try a head's layer ids and their neighbours on `num_tokens` tokens after each prompt.

    Returns None for a head that reads the last state only. Raises as `first_guess_share` does.
    """
    own = make_head(options, loaded.for_heads).layer_ids
    if own == (FINAL,):
        return None
    numbers = count()

    def accept(ids: tuple[int, ...]) -> float:
        salt = b"layers-%d" % next(numbers)
        return first_guess_share(loaded, options.model_copy(update={"layer_ids": ids}), prompts, num_tokens, salt)

    return try_layer_ids(own, loaded.runner.num_layers, accept)
