"""The cheapest deployment that holds the objectives."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.plan.deployment import Placement, Question, placements
from specdec.plan.estimate import Option, estimated, impossible
from specdec.plan.found import Found, Tried, Update
from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.kind import Kind
from specdec.plan.proof import Proofs
from specdec.plan.simulation.faults import Scope
from specdec.plan.simulation.pair import Speculation
from specdec.plan.trial import State, Trials

_MOST_TARGETS = 100_000
_MOST_TIMES, _FEW_TARGETS = 20, 64
"""Factor over a kind's least number of targets, and a number, above both of which more targets are not tried."""
_MORE = 1.08
"""Factor to the next number of targets that is tried, in large fleets."""
_CLOSE = 50
"""Part of a number of targets up to which it is told from the next one."""
_MORE_FOR_UPDATES = 2
"""Factor over a plan's targets up to which it is asked how many hold while one after the other is replaced."""
_WORTH_TRYING = 1.02
"""Factor over a price up to which a kind's estimated price makes it worth a trial: estimates are rough."""


def search(
    question: Question,
    trials: Trials,
    speculation: Speculation,
    seeds: Sequence[int],
    tell: Callable[[str], None] = lambda what: None,
) -> Found:
    """Raise the cheapest candidate's number of targets until it is the cheapest that holds by all figures.

    A candidate is a kind of replica: first with as few targets as survive, then with an estimated number, with what
    holds in rough trials, and with what holds by the figures that the plan shows. Raises PlanImpossible, with what is
    possible.
    """
    proofs = Proofs(trials, seeds, tell)
    least = least_targets(trials.scopes)
    open_ = []
    for number, placement in enumerate(placements(question)):
        price = placement.price_of(least, may_lose=bool(trials.scopes)) / _WORTH_TRYING
        open_.append(_Candidate(price, (placement.num_ranks, 0, number), placement, least, num=least))
    heapq.heapify(open_)
    given_up: list[_Candidate] = []
    while open_:
        candidate = heapq.heappop(open_)
        if candidate.option is None:
            candidate.take(estimated(question, trials, candidate.placement, speculation, tell), trials)
        elif candidate.climb(proofs, open_[0].price if open_ else math.inf, tell):
            if candidate.is_proven:
                return _found(proofs, candidate, [each.tried for each in (candidate, *open_, *given_up)])
            candidate.is_rough = False
        if candidate.num > candidate.ceiling:
            given_up.append(candidate)
        else:
            heapq.heappush(open_, candidate)
    options = [each.option for each in given_up if each.option is not None]
    least_of_all = min((option.least for option in options if option.least is not None), default=0)
    if least_of_all > _MOST_TARGETS:
        raise PlanImpossible(
            f"this load takes about {least_of_all} targets, and {_MOST_TARGETS} are planned at most: plan a part of it"
        )
    raise impossible(options, trials)


@dataclass(order=True)
class _Candidate:
    """A kind of replica, and the number of targets that it is known to need at least."""

    price: float
    rank: tuple[int, int, int]
    """Of equal prices that with the most and smallest targets is taken, of these the fastest, by classes of 7 %."""
    placement: Placement = field(compare=False)
    least: int = field(compare=False)
    """Targets that the throughput and the losses to bear take."""
    num: int = field(compare=False)
    """Targets that it takes by what is known of it."""
    option: Option | None = field(default=None, compare=False)
    """None: it is not estimated yet."""
    is_rough: bool = field(default=True, compare=False)
    """Whether rough trials are still to tell how many targets hold."""
    is_proven: bool = field(default=False, compare=False)

    @property
    def ceiling(self) -> int:
        """Targets beyond which it is given up."""
        if self.option is not None and self.option.least is None:
            return 0
        return min(_MOST_TARGETS, max(_FEW_TARGETS, _MOST_TIMES * self.least))

    @property
    def tried(self) -> Tried:
        """What became of it."""
        label, why = self.placement.label, "" if self.is_proven else "costs more"
        if self.option is not None and self.option.why_not:
            return Tried(label, 0, None, 0.0, self.option.why_not)
        if self.num > self.ceiling:
            return Tried(label, self.least, None, 0.0, f"{self.ceiling} targets do not hold the objectives")
        if self.is_rough and self.num > self.least:
            why = f"fewer than {self.num} do not hold, and these cost more"
        is_estimated = self.is_rough and self.num == self.least
        price = self.price * _WORTH_TRYING if is_estimated else self.price
        return Tried(label, self.least, None if self.is_rough else self.num, price, why)

    def take(self, option: Option, trials: Trials) -> None:
        """Begin with what is estimated."""
        self.option, self.least = option, max(self.least, option.least or 1)
        num_ranks, _, number = self.rank
        self.num, self.rank = self.least, (num_ranks, -round(math.log(option.tokens_per_s, 1.07)), number)
        self.price = self.placement.price_of(self.num, may_lose=bool(trials.scopes)) / _WORTH_TRYING

    def climb(self, proofs: Proofs, rival: float, tell: Callable[[str], None]) -> bool:
        """Look for the fewest targets that hold, as long as they cost less than the rival; False: they cost more."""
        assert self.option is not None
        kind, trials = self.option.kind, proofs.trials

        def holds(num: int) -> bool:
            if not self.is_rough:
                return not proofs.missed(kind, num)
            tell(f"{kind.placement.label}: {num} targets")
            return trials.holds(kind, num, proofs.seeds[0])

        most = max(self.num, min(self.ceiling, self._affordable(trials, rival)))
        num = fewest(holds, self.num, most, self.num if self.is_rough else self.least)
        self.num = most + 1 if num is None else num
        self.is_proven = num is not None and not self.is_rough
        self.price = kind.placement.price_of(self.num, may_lose=bool(trials.scopes))
        return num is not None

    def _affordable(self, trials: Trials, price: float) -> int:
        """The most targets that cost at most `price`."""
        placement = self.placement
        num = math.floor(min(price / (placement.device.price * placement.num_ranks), self.ceiling))
        while num > self.num and placement.price_of(num, may_lose=bool(trials.scopes)) > price:
            num -= 1
        return num


def fewest(holds: Callable[[int], bool], start: int, most: int, least: int) -> int | None:
    """The fewest targets that hold, from `least` to `most`, searched from `start`; None: `most` do not hold."""
    num, below, stride = start, least - 1, step(start)
    if holds(num):
        while num > least:
            fewer = max(least, num - stride)
            if not holds(fewer):
                below = fewer
                break
            num, stride = fewer, 2 * stride
    else:
        while below == least - 1 or not holds(num):
            if num >= most:
                return None
            below, num = num, min(most, max(num + 1, round(num * _MORE)))
    while num - below > step(num):
        middle = (num + below) // 2
        num, below = (middle, below) if holds(middle) else (num, middle)
    return num


def step(num_targets: int) -> int:
    """Difference below which two numbers of targets are not told apart."""
    return max(1, num_targets // _CLOSE)


def least_targets(scopes: Sequence[Scope]) -> int:
    """The fewest targets of which some are left after each loss: they are spread over zones and nodes."""
    return 2 if scopes else 1


def _found(proofs: Proofs, candidate: _Candidate, tried: Sequence[Tried]) -> Found:
    assert candidate.option is not None
    kind, num, trials = candidate.option.kind, candidate.num, proofs.trials
    figures = proofs.figures(kind, num)
    return Found(
        kind=kind,
        deployment=trials.deployment(kind, num, figures),
        figures=figures,
        with_loss={scope: proofs.figures(kind, num, scope) for scope in trials.scopes_of(kind)},
        rolled=proofs.figures(kind, num, State.UPDATE) if num > 1 else None,
        update=_update(proofs, kind, num),
        fewer=proofs.missed(kind, num - step(num)) if num > candidate.least else "",
        tried=tried,
    )


def _update(proofs: Proofs, kind: Kind, num: int) -> Update | None:
    """What a rolling update misses, and the number of targets with which it misses nothing."""

    def missed(number: int) -> str:
        return proofs.missed_in(State.UPDATE, kind, number)

    if num > 1 and not missed(num):
        return None
    more = fewest(lambda number: not missed(number), num + 1, _MORE_FOR_UPDATES * num + 1, num + 1)
    prices = [kind.placement.price_of(each, may_lose=bool(proofs.trials.scopes)) for each in (num, more or num)]
    return Update(missed=missed(num) if num > 1 else "", num_targets=more, more=prices[1] - prices[0])
