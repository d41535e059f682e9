"""Shares of tenants hold on places: for every mix of tenants and choices, and however long the choices last."""

from __future__ import annotations

import asyncio

from specdec.coordinator.intake.admission import AdmissionQueue, Place
from specdec.coordinator.intake.fair_queue import FairQueue
from specdec.coordinator.intake.line import Claim
from specdec.coordinator.intake.shares import PlaceShares
from tests.support.for_each import for_each


class Load:
    """Tenants that always want more places, with choices of a length of their own."""

    def __init__(self, num_places: int, lengths: dict[str, tuple[int, int, float]]) -> None:
        """`lengths`: by tenant, the choices of a request, the rounds that a choice lasts, and the weight."""
        self.queue = AdmissionQueue(num_places, 1000, 60.0)
        self._lengths = lengths
        self._running: dict[Place, list[int]] = {}
        """The round in which each choice ends."""
        self._waiting: list[asyncio.Task[Place]] = []
        self._round = 0

    async def run(self, tenants: str, num_rounds: int) -> None:
        """Let these tenants ask in each round, and choices end."""
        for _ in range(num_rounds):
            self._round += 1
            for tenant in tenants:
                num, lasts, weight = self._lengths[tenant]
                wanting = sum(claim.tenant == tenant for claim in self._claims())
                for _ in range(max(0, 64 - wanting)):
                    claim = Claim(tenant, work=256.0, num_places=num, is_divisible=True, weight=weight)
                    self._waiting.append(asyncio.create_task(self.queue.acquire(claim), name=tenant))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in [task for task in self._waiting if task.done()]:
                self._waiting.remove(task)
                self._running[task.result()] = []
            for place, ends in list(self._running.items()):
                lasts = self._lengths[place.claim.tenant][1]
                ends += [self._round + lasts] * (place.num_held - len(ends))
                for end in [end for end in ends if end <= self._round]:
                    ends.remove(end)
                    place.end_one()
                    ends += [self._round + lasts] * (place.num_held - len(ends))
                if not ends:
                    del self._running[place]
                    place.release(256.0 * lasts)

    def held(self, tenant: str) -> int:
        """Places of a tenant, with those that were granted in this turn of the event loop."""
        return self.queue._shares.num_held(tenant)

    def close(self) -> None:
        for task in self._waiting:
            task.cancel()

    def _claims(self) -> list[Claim]:
        """The claims in line."""
        return [Claim(task.get_name()) for task in self._waiting]


@for_each(
    "lengths, tenants",
    [
        ({"a": (1, 200, 1.0), "b": (1, 2, 1.0)}, "ab"),
        ({"a": (16, 200, 1.0), "b": (1, 2, 1.0)}, "ab"),
        ({"a": (1, 200, 1.0), "b": (16, 2, 1.0)}, "ab"),
        ({"a": (16, 60, 1.0), "b": (16, 60, 1.0), "c": (2, 3, 1.0)}, "abc"),
        ({"a": (1, 60, 1.0), "b": (5, 7, 3.0), "c": (16, 20, 1.0)}, "abc"),
        ({"a": (64, 400, 1.0), "b": (1, 1, 1.0), "c": (1, 1, 1.0), "d": (3, 9, 1.0)}, "abcd"),
    ],
)
def test_each_tenant_comes_to_its_share_of_the_places_and_keeps_it(
    lengths: dict[str, tuple[int, int, float]], tenants: str
) -> None:
    async def run() -> None:
        load = Load(64, lengths)
        await load.run("a", 3)
        assert load.held("a") == 60  # alone it has all but what is kept for one that comes
        await load.run(tenants, 450)
        weights = sum(weight for _, _, weight in lengths.values())
        for _ in range(20):
            await load.run(tenants, 1)
            for tenant, (_, _, weight) in lengths.items():
                assert load.held(tenant) >= int(64 * weight / weights) - 1, tenant
        load.close()

    asyncio.run(run())


async def test_one_of_several_tenants_leaves_a_quarter_so_that_others_begin_with_all_their_choices() -> None:
    queue = AdmissionQueue(64, 100, 60.0)
    first = await queue.acquire(Claim("other", num_places=1, is_divisible=True))
    first.release()
    crowd = [asyncio.create_task(queue.acquire(Claim("crowd", num_places=16, is_divisible=True))) for _ in range(5)]
    await asyncio.sleep(0)
    assert queue.num_taken == 48
    other = await queue.acquire(Claim("other", num_places=16, is_divisible=True))
    assert other.num_held == 16
    for task in crowd:
        task.cancel()


def test_a_tenant_that_has_not_come_for_long_keeps_no_places_from_others_and_names_are_not_gathered() -> None:
    now_s = 0.0
    shares = PlaceShares(FairQueue(), lambda: now_s)
    for name in map(str, range(1000)):
        shares.came(Claim(name))
    shares.came(Claim("last"))
    assert shares.left(Claim("last"), 64) == 48
    now_s = 700.0
    shares.came(Claim("last"))
    assert shares.left(Claim("last"), 64) == 60
    assert len(repr(vars(shares))) < 500
