"""The cheapest deployment that holds the objectives."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.plan.deployment import Question, placements
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

    A candidate is a kind of replica: at first with an estimated number, then with what holds in rough trials, at last
    with what holds by the figures that the plan shows. Raises PlanImpossible, with what is possible.
    """
    options = [estimated(question, trials, placement, speculation, tell) for placement in placements(question)]
    possible = [option for option in options if option.least is not None]
    if not possible:
        raise impossible(options, trials)
    least_of_all = min(option.least or 1 for option in possible)
    if least_of_all > _MOST_TARGETS:
        raise PlanImpossible(
            f"this load takes about {least_of_all} targets, and {_MOST_TARGETS} are planned at most: plan a part of it"
        )
    proofs = Proofs(trials, seeds, tell)
    open_ = []
    for number, option in enumerate(possible):
        least = max(least_targets(trials.scopes), option.least or 1)
        open_.append(_Candidate(option.price / _WORTH_TRYING, number, option, least, num=least))
    heapq.heapify(open_)
    given_up: list[_Candidate] = []
    while open_:
        candidate = heapq.heappop(open_)
        if candidate.climb(proofs, open_[0].price if open_ else math.inf, tell):
            if candidate.is_proven:
                tried = [each.tried for each in (candidate, *open_, *given_up)]
                return _found(proofs, candidate, tried + [_unfit(each) for each in options if not each.least])
            candidate.is_rough = False
        elif candidate.num > candidate.ceiling:
            given_up.append(candidate)
            continue
        heapq.heappush(open_, candidate)
    raise impossible(options, trials)


@dataclass(order=True)
class _Candidate:
    """A kind of replica, and the number of targets that it is known to need at least."""

    price: float
    number: int
    """Its place among the options: of equal prices the first one is taken."""
    option: Option = field(compare=False)
    least: int = field(compare=False)
    """Targets that the throughput and the losses to bear take."""
    num: int = field(compare=False)
    is_rough: bool = field(default=True, compare=False)
    """Whether rough trials are still to tell how many targets hold."""
    is_proven: bool = field(default=False, compare=False)

    @property
    def ceiling(self) -> int:
        """Targets beyond which it is given up."""
        return min(_MOST_TARGETS, max(_FEW_TARGETS, _MOST_TIMES * self.least))

    @property
    def tried(self) -> Tried:
        """What became of it."""
        label, least = self.option.kind.placement.label, self.least
        if self.num > self.ceiling:
            return Tried(label, least, None, self.option.price, f"{self.ceiling} targets do not hold the objectives")
        if self.is_rough and self.num > least:
            return Tried(label, least, None, self.price, f"fewer than {self.num} do not hold, and these cost more")
        if self.is_rough:
            return Tried(label, least, None, self.option.price, "costs more")
        return Tried(label, least, self.num, self.price, "" if self.is_proven else "costs more")

    def climb(self, proofs: Proofs, rival: float, tell: Callable[[str], None]) -> bool:
        """Look for the fewest targets that hold, as long as they cost less than the rival; False: they cost more."""
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
        placement = self.option.kind.placement
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
    price = kind.placement.price_of(more, may_lose=bool(proofs.trials.scopes)) if more else 0.0
    return Update(missed=missed(num) if num > 1 else "", num_targets=more, price=price)


def _unfit(option: Option) -> Tried:
    return Tried(option.kind.placement.label, 0, None, 0.0, option.why_not)
