"""Checks by requests: acceptance, speed against plain decoding, and equal output with and without speculation."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count

from specdec.client import Client, Completion
from specdec.commands.doctor.findings import Finding, failed, passed, warned
from specdec.commands.measuring.requests import Prompt, Sampling, make_request
from specdec.v1 import coordinator_pb2 as api

_LOW_ACCEPTANCE = 0.4
"""Share of accepted tokens at depth 1 below which speculation hardly pays at any cost."""
_SLOWER = 0.95
"""Ratio to plain decoding below which a line is a warning."""
_SHORT_TOKENS = 30
"""Tokens of an answer below which a draft hardly takes effect."""
Asker = Callable[[api.GenerateRequest], None]
Connect = Callable[[], AbstractAsyncContextManager[Client]]


async def check_behaviour(
    connect: Connect,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_tokens: int,
    concurrency: int,
    repeats: int = 3,
) -> AsyncGenerator[Finding, None]:
    """Yield the lines that need requests.

    Args:
        connect: makes a client with its own tenant, so that no run profits from another's caches and drafters'
            memories. With an API key all clients are one tenant.
        prompts: prompts like the users'.
        temperature: the users'.
        max_tokens: tokens of each answer.
        concurrency: requests at once under load.
        repeats: runs with and without speculation at each load; they alternate.

    Raises the typed errors of `specdec.wire.errors`.
    """
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, verify_mode=None)
    rates = await _rates(connect, prompts, sampling, 1, repeats)
    yield _acceptance(rates.speculative, temperature)
    yield _pays("speculation pays, one request at a time", rates)
    yield _never_slower(await _rates(connect, prompts, sampling, concurrency, repeats), concurrency)
    if max_tokens < _SHORT_TOKENS:
        yield warned(
            "answers are long enough",
            f"{max_tokens} tokens",
            f"measure longer ones: below {_SHORT_TOKENS} tokens a draft hardly takes effect",
        )
    async with connect() as client:
        info = await client.model_info()
        plain = await client.complete(make_request(prompts[0], _COMPARED, 0, speculate=False))
        changes = {"stop strings": _stop_within(plain.choices[0].text), **_CHANGES}
        for what, change in changes.items():
            yield await _same_output(client, prompts[0], what, change, is_exact=info.target.row_invariant)


class _Rates:
    """Ratios of alternating runs with and without speculation, and the answers with it."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.speculative: list[Completion] = []


async def _rates(connect: Connect, prompts: Sequence[Prompt], sampling: Sampling, at_once: int, repeats: int) -> _Rates:
    rates = _Rates()
    loop = asyncio.get_running_loop()
    chosen = [prompts[index % len(prompts)] for index in range(max(at_once, len(prompts)))]

    async def run(speculate: bool, first_seed: int) -> tuple[float, list[Completion]]:
        places = asyncio.Semaphore(at_once)
        async with connect() as client:

            async def one(prompt: Prompt, seed: int) -> Completion:
                async with places:
                    return await client.complete(make_request(prompt, sampling, seed, speculate=speculate))

            began_s = loop.time()
            completions = await asyncio.gather(*(one(*asked) for asked in zip(chosen, count(first_seed), strict=False)))
            elapsed_s = loop.time() - began_s
        return sum(completion.num_tokens for completion in completions) / elapsed_s, completions

    await run(True, 0)  # warm-up: the services measure their own step times
    for repeat in range(1, repeats + 1):
        found = {}
        for speculate in (True, False) if repeat % 2 == 0 else (False, True):
            found[speculate], completions = await run(speculate, repeat * len(chosen))
            rates.speculative += completions if speculate else []
        rates.ratios.append(found[True] / found[False])
    return rates


def _acceptance(completions: Sequence[Completion], temperature: float) -> Finding:
    what = f"draft tokens are accepted, temperature {temperature:g}"
    stats = [completion.require_finished().stats for completion in completions]
    deepest = max((len(one.verified_by_depth) for one in stats), default=0)
    verified, accepted = [0] * deepest, [0] * deepest
    num_verify_steps = sum(one.num_verify_steps for one in stats)
    for one in stats:
        for depth, num in enumerate(one.verified_by_depth):
            verified[depth] += num
        for depth, num in enumerate(one.accepted_by_depth):
            accepted[depth] += num
    if not num_verify_steps:
        do = "see `specdec debug`: the target may have suspended speculation, because plain decoding is faster"
        return warned(what, "nothing was verified", do)
    shares = [hits / num for hits, num in zip(accepted, verified, strict=True) if num]
    by_depth = " ".join(f"{share:.2f}" for share in shares[:8])
    measured = f"by depth {by_depth}, {num_verify_steps} verifying steps"
    if shares[0] < _LOW_ACCEPTANCE:
        return warned(
            what, measured, "use a draft of the same family, other drafters, or no speculation for such prompts"
        )
    return passed(what, measured)


def _pays(what: str, rates: _Rates) -> Finding:
    ratio = statistics.median(rates.ratios)
    measured = f"{ratio:.2f} times plain decoding ({min(rates.ratios):.2f} to {max(rates.ratios):.2f})"
    if ratio < _SLOWER:
        return warned(what, measured, "run `specdec tune`: it says why, and advises settings")
    return passed(what, measured)


def _never_slower(rates: _Rates, concurrency: int) -> Finding:
    what = f"speculation is not slower at {concurrency} requests at once"
    suspended = sum(one.require_finished().stats.num_suspended_steps for one in rates.speculative)
    steps = sum(one.require_finished().stats.num_steps for one in rates.speculative)
    ratio = statistics.median(rates.ratios)
    spread = f"{ratio:.2f} times plain decoding ({min(rates.ratios):.2f} to {max(rates.ratios):.2f})"
    measured = f"{spread}; drafts suspended after {suspended / steps:.0%} of steps" if steps else spread
    if ratio < _SLOWER:
        do = "check that adaptive_speculation is on; add targets, lower max_draft_tokens, or switch speculation off"
        return warned(what, measured, do)
    return passed(what, measured)


def _stop_within(text: str) -> Asker:
    """A request change that stops such an answer in its middle, so that drafts reach past the stop."""
    middle = text[len(text) // 2 :][:4] or "\n"

    def change(request: api.GenerateRequest) -> None:
        request.sampling.stop.append(middle)

    return change


def _grammar(request: api.GenerateRequest) -> None:
    request.sampling.constraint.regex = "[a-z]{8,40}"
    request.sampling.ignore_eos = False


def _logprobs(request: api.GenerateRequest) -> None:
    request.sampling.logprobs = 2


_COMPARED = Sampling(max_tokens=48, verify_mode=None)
_CHANGES: dict[str, Asker] = {"a grammar": _grammar, "log-probabilities": _logprobs}


async def _same_output(client: Client, prompt: Prompt, what: str, change: Asker, *, is_exact: bool) -> Finding:
    line = f"with {what} greedy output is the same with and without speculation"
    texts = []
    for speculate in (True, False):
        request = make_request(prompt, _COMPARED, 0, speculate=speculate)
        change(request)
        completion = await client.complete(request)
        texts.append((completion.choices[0].text, completion.choices[0].token_ids))
    if texts[0] == texts[1]:
        return passed(line, f"{len(texts[0][1])} tokens")
    if is_exact:
        return failed(
            line, f"{texts[0][0][:30]!r} and {texts[1][0][:30]!r}", f"report this defect; decode plainly with {what}"
        )
    return warned(line, "it differs, perhaps by a near-tie", "run `specdec audit`: it tells near-ties from faults")
