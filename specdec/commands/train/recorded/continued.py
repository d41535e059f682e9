"""The target's continuations of prompts, by its own engine or by a service."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from specdec.client import ClientSettings, SyncClient
from specdec.commands.train.pace import Pace
from specdec.commands.train.recipe import TrainingRefused
from specdec.commands.train.recorded.journal import OutputJournal
from specdec.commands.train.recorded.texts import Outputs, Tell, Text, continuations, is_held_out
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationTask:
    """What the target is asked."""

    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """Prompts to measure on; empty: every tenth of the others."""
    temperatures: tuple[float, ...]
    """Temperatures; a training prompt is continued at one of them in turn, a held-out one at all."""
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class ServingCoordinator:
    """A coordinator that serves the target."""

    address: str
    settings: ClientSettings


def make_texts(
    asked: ContinuationTask,
    engine: Engine,
    runner: ModelRunner,
    work: Path,
    tell: Tell,
    service: ServingCoordinator | None = None,
) -> list[Text]:
    """Continue the prompts, or read the texts that an earlier run kept in the folder `work`.

    Raises TrainingRefused if a prompt does not fit, the folder holds other texts, or the service refuses the tokens;
    and the typed errors of `specdec.wire.errors`.
    """
    tokenizer = Tokenizer.from_str(runner.tokenizer_json) if runner.tokenizer_json else None

    def ids(prompts: Sequence[Prompt]) -> list[list[int]]:
        return [_ids(prompt, tokenizer, runner) for prompt in prompts]

    learned, held_out = ids(asked.prompts), ids(asked.held_out)
    if not held_out:
        held_out = [prompt for number, prompt in enumerate(learned) if is_held_out(number)]
        learned = [prompt for number, prompt in enumerate(learned) if not is_held_out(number)]
    if not learned or not held_out:
        raise TrainingRefused("too few prompts: at least ten are needed, or one with --held-out")
    origin: dict[str, object] = {
        "learned": learned,
        "held_out": held_out,
        "temperatures": list(asked.temperatures),
        "max_tokens": asked.max_tokens,
        "seed": asked.seed,
        "target": runner.identity.weights_digest,
    }
    work.mkdir(parents=True, exist_ok=True)
    ask = partial(continuations, engine, runner) if service is None else partial(_served, service)
    journal = OutputJournal(work / "texts.jsonl", origin)
    texts: list[Text] = []
    count = len(asked.temperatures)
    for number, temperature in enumerate(asked.temperatures):
        groups = ((held_out, True), (learned[number::count], False))
        for prompts, is_out in groups:
            missing = journal.missing(number, is_out, len(prompts))
            what = f"{'held-out ' if is_out else ''}continuations at temperature {temperature:g}"
            pace, seed = Pace(len(missing)), asked.seed + (1_000_000 if is_out else 0)
            with closing(
                ask(prompts, missing, temperature=temperature, max_tokens=asked.max_tokens, seed=seed)
            ) as found:
                for done, (prompt, output) in enumerate(found, 1):
                    journal.add(number, is_out, prompt, output)
                    tell(f"{what}: {pace.at(done)}")
            texts += [
                Text(tuple(prompt), tuple(output), temperature, is_out)
                for prompt, output in zip(prompts, journal.outputs(number, is_out, len(prompts)), strict=True)
            ]
    return texts


def _ids(prompt: Prompt, tokenizer: Tokenizer | None, runner: ModelRunner) -> list[int]:
    if isinstance(prompt, tuple):
        ids = list(prompt)
    elif tokenizer is None:
        raise TrainingRefused("the target has no tokenizer: give prompts as token ids")
    else:
        ids = list(tokenizer.encode(prompt).ids)
    if not ids or max(ids) >= runner.vocab_size:
        raise TrainingRefused("a prompt has no token, or a token id outside the target's vocabulary")
    return ids


def _served(
    service: ServingCoordinator,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> Outputs:
    """As `continuations`, by a service."""
    with SyncClient(service.address, service.settings) as client:
        for number in numbers:
            request = api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=prompts[number]))
            request.sampling.temperature = temperature
            request.sampling.max_tokens = max_tokens
            request.sampling.seed = seed + number
            try:
                completion = client.complete(request)
            except InvalidRequest as error:
                raise TrainingRefused(f"prompt {number}: {error}") from error
            yield number, list(completion.choices[0].token_ids)
