"""What an ambiguous grammar takes of another stream: `python -m bench.constraint_cost`.

One stream of the shipped pair decodes alone, beside requests of 24 choices without a constraint, and beside as many
with a grammar whose masks take ever longer. In turns; quartiles of the seconds that the one stream takes.
"""

from __future__ import annotations

import asyncio
import statistics

from rich.console import Console

from bench.calibration.real import Setup, deployed
from bench.pairs import resolve_pair
from bench.plan import BenchPlan
from bench.prompts import held_out_prompts
from specdec.client import Client
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import Sampling, make_request

_GRAMMAR = 'start: s\ns: s s | /[a-z ]/ | ""'
_KINDS = ("alone", "unconstrained", "ambiguous")
_REQUESTS, _CHOICES, _TOKENS = 3, 8, 300
_LEAD_S = 3.0
"""Seconds of the other requests before the measured one."""
_REPEATS = 5


async def _seconds(address: str, prompts: list[tuple[int, ...]], kind: str) -> float:
    loop = asyncio.get_running_loop()
    async with Client(address) as client:
        others = []
        for number in range(_REQUESTS if kind != "alone" else 0):
            sampling = Sampling(temperature=1.0, max_tokens=3 * _TOKENS)
            request = make_request(prompts[1 + number][:20], sampling, number, speculate=True)
            request.sampling.n = _CHOICES
            if kind == "ambiguous":
                request.sampling.constraint.grammar = _GRAMMAR
            others.append(asyncio.create_task(client.complete(request)))
        await asyncio.sleep(_LEAD_S if others else 0.0)
        began_s = loop.time()
        found = await client.complete(make_request(prompts[0], Sampling(max_tokens=_TOKENS), 1, speculate=True))
        took_s = loop.time() - began_s
        assert not any(other.done() for other in others), "the others ended before it"
        assert len(found.choices[0].token_ids) == _TOKENS
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return took_s


def main() -> None:
    """Print a line for each kind of company."""
    plan = BenchPlan(pair=resolve_pair("shipped", "cpu"), cores=(0, 1), max_tokens=_TOKENS)
    prompts = held_out_prompts(plan.pair.target.folder, 1 + _REQUESTS)
    took_s: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with Progress(Console()) as progress, deployed(Setup("one target"), plan, progress) as cluster:
        for _ in range(_REPEATS):
            for kind in _KINDS:
                progress.tell(kind)
                took_s[kind].append(asyncio.run(_seconds(cluster.address, prompts, kind)))
    for kind, seconds in took_s.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(f"{kind}: {middle:.2f} s ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
