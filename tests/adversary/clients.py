"""Clients that ask without end, take up what was interrupted, and compare every answer with the undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing

from specdec.client import Client, Completion, generate_resuming
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Overloaded, SpecdecError, Unavailable
from tests.adversary.fleet import Fleet
from tests.adversary.progress import Progress
from tests.adversary.verdict import Verdict
from tests.adversary.workload import difference, prefix_difference

GIVE_UP_S = 90.0
"""After so long a request counts as hung, so that a run comes to its end."""
LONGEST_WAIT_S = 5.0
CUT_OFF_SHARE = 0.05
NUM_AT_ONCE = 8


async def undisturbed(fleet: Fleet, requests: Sequence[api.GenerateRequest]) -> list[Completion]:
    """The answers while nothing is wrong, each asked for once."""
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with Client(fleet.address_for(fleet.topology.clients[0])) as client:

        async def answer(body: api.GenerateRequest) -> Completion:
            async with places:
                return await client.complete(body)

        return list(await asyncio.gather(*(answer(body) for body in requests)))


class Clients:
    """All clients of a run."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[api.GenerateRequest],
        references: Sequence[Completion],
        progress: Progress,
        verdict: Verdict,
        seed: int,
    ) -> None:
        self._fleet = fleet
        self._pairs = list(zip(requests, references, strict=True))
        self._progress = progress
        self._verdict = verdict
        self._seed = seed
        self._ending = False

    def end(self) -> None:
        """Let all end with the request that they are at."""
        self._ending = True

    async def run(self) -> None:
        """Ask until `end`."""
        async with asyncio.TaskGroup() as group:
            for name in self._fleet.topology.clients:
                group.create_task(self._run_one(name), name=name)

    async def _run_one(self, name: str) -> None:
        rng = random.Random(f"{self._seed} {name}")
        number = 0
        async with Client(self._fleet.address_for(name)) as client:
            while not self._ending:
                index = rng.randrange(len(self._pairs))
                body, reference = self._pairs[index]
                cut_after = None
                if rng.random() < CUT_OFF_SHARE:
                    cut_after = rng.randrange(1, max(2, reference.num_tokens))
                await self._ask(client, rng, f"{name}/{number}/request {index}", body, reference, cut_after)
                number += 1

    async def _ask(
        self,
        client: Client,
        rng: random.Random,
        name: str,
        body: api.GenerateRequest,
        reference: Completion,
        cut_after: int | None,
    ) -> None:
        """One request to its end."""
        self._progress.begin(name, max(1, len(reference.choices)))
        completion = Completion()
        verdict = self._verdict
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self._read(client, rng, name, body, completion, cut_after)
        except TimeoutError:
            verdict.fail("hung", f"{name} has no end after {GIVE_UP_S:g} s; {_held(completion)}")
        except SpecdecError as error:
            verdict.fail("error", f"{name}: {type(error).__name__} {error.reason}: {error}; {_held(completion)}")
        else:
            is_cut_off = completion.finished is None and cut_after is not None
            found = (prefix_difference if is_cut_off else difference)(completion, reference)
            if found is not None:
                verdict.fail("unequal", f"{name}: {found}; {_held(completion)}")
            elif is_cut_off:
                verdict.num_cut_off += 1
            else:
                verdict.num_equal += 1
        finally:
            self._progress.end(name)

    async def _read(
        self,
        client: Client,
        rng: random.Random,
        name: str,
        body: api.GenerateRequest,
        completion: Completion,
        cut_after: int | None,
    ) -> None:
        while True:
            try:
                async with aclosing(generate_resuming(client, body)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        completion.add(chunk)
                        self._note(name, chunk)
                        if cut_after is not None and completion.num_tokens >= cut_after:
                            return
                return
            except (Unavailable, Overloaded) as error:
                if completion.started is not None:
                    raise
                self._verdict.refusals[error.reason] += 1
                wait_s = min(error.retry_after_s, LONGEST_WAIT_S) * rng.uniform(0.5, 1.0)
            await asyncio.sleep(wait_s)

    def _note(self, name: str, chunk: api.GenerateResponse) -> None:
        match chunk.WhichOneof("chunk"):
            case "delta":
                self._progress.move(name, chunk.delta.index)
            case "choice_finished":
                self._progress.move(name, chunk.choice_finished.index, is_end=True)


def _held(completion: Completion) -> str:
    started = completion.started
    where = "nothing held" if started is None else f"request id {started.request_id}"
    return f"{where}, tokens by choice {[len(c.tokens) for _, c in sorted(completion.choices.items())]}"
