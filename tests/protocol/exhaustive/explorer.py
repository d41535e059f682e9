"""Goes through all orders of events of a small system, depth first, and through no state twice.

A system cannot be copied, as coroutines cannot: a branch is reached by doing again, from the start, what led to it. So
each finding comes with the schedule that shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class System(Protocol):
    """What is explored. Equal events lead from equal states to equal states."""

    def events(self) -> list[str]:
        """What can happen next, in a fixed order; none: it rests."""

    def apply(self, event: str) -> None:
        """Let it happen."""

    def are_apart(self, first: str, second: str) -> bool:
        """Whether two events happen in different places: in both orders they lead to the same state."""

    def fingerprint(self) -> object:
        """Hashable; equal where nothing that matters differs."""

    def faults(self) -> list[str]:
        """What is seen that must not be."""

    def is_done(self) -> bool:
        """It may rest here."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(slots=True)
class Report:
    """What an exploration came to."""

    num_states: int = 0
    num_transitions: int = 0
    num_runs: int = 0
    longest: int = 0
    """Events from the start to the state that is furthest away on its first path."""
    is_complete: bool = False
    """All states were seen."""
    finding: str = ""
    schedule: Sequence[str] = ()
    """The events that show the finding."""

    def __str__(self) -> str:
        extent = "all" if self.is_complete else "not all"
        text = f"{self.num_states} states ({extent}), {self.num_transitions} transitions, depth {self.longest}"
        return text if not self.finding else f"{text}\n{self.finding}\nafter --events '{';'.join(self.schedule)}'"


@dataclass(slots=True)
class _Graph:
    back: dict[object, set[object]] = field(default_factory=dict)
    """From each state to those before it."""
    paths: dict[object, tuple[str, ...]] = field(default_factory=dict)
    asleep: dict[object, frozenset[str]] = field(default_factory=dict)
    """Events that were not tried in a state, as they were tried before it and change nothing of what came between."""
    done: set[object] = field(default_factory=set)

    def unable_to_end(self) -> object | None:
        """A state from which no order of events leads to where the system may rest."""
        able, queue = set(self.done), deque(self.done)
        while queue:
            for before in self.back.get(queue.popleft(), ()):
                if before not in able:
                    able.add(before)
                    queue.append(before)
        return next((state for state in self.paths if state not in able), None)


@dataclass(frozen=True, slots=True)
class _Branch:
    """Where to go on: the last event of the path is still to be tried."""

    path: tuple[str, ...]
    asleep: frozenset[str]
    """What need not be tried where the path leads: see `explore`."""


def explore(make: Callable[[], System], *, most_states: int, must_end: bool = True) -> Report:
    """Explore until everything was seen, something was found, or there are too many states.

    Of two events in different places that can follow each other in both orders, the second order leads to the state of
    the first one, and is not tried (sleep sets: Godefroid, Partial-Order Methods, 1996, with the states' own sleep sets
    kept). No state is missed for it.

    Args:
        make: makes the system as it is at the start.
        most_states: where to give up.
        must_end: whether it is a finding when no end is in reach.
    """
    report, graph = Report(), _Graph()
    waiting = [_Branch((), frozenset())]
    while waiting and not report.finding and report.num_states < most_states:
        _run(make, waiting.pop(), waiting, report, graph, must_end)
    report.is_complete = not waiting and not report.finding
    if must_end and report.is_complete and (stuck := graph.unable_to_end()) is not None:
        report.finding, report.schedule = "no order of events leads to an end from here", graph.paths[stuck]
    return report


def replay(make: Callable[[], System], schedule: Sequence[str]) -> list[str]:
    """Do a schedule again; returns what is seen that must not be."""
    system = make()
    try:
        for event in schedule:
            system.apply(event)
        return system.faults()
    finally:
        system.close()


def _run(
    make: Callable[[], System],
    branch: _Branch,
    waiting: list[_Branch],
    report: Report,
    graph: _Graph,
    must_end: bool,
) -> None:
    """Follow one path, which is new from its last event on, as far as there is something to try."""
    system, path, asleep = make(), branch.path, branch.asleep
    report.num_runs += 1
    try:
        before: object = None
        for event in path[:-1]:
            system.apply(event)
        if path:
            before = system.fingerprint()
            system.apply(path[-1])
        while untried := _arrive(system, path, asleep, before, report, graph, must_end):
            tried = set(asleep)
            branches = []
            for event in untried:
                branches.append(_Branch((*path, event), frozenset(e for e in tried if system.are_apart(e, event))))
                tried.add(event)
            waiting.extend(reversed(branches[1:]))
            before = system.fingerprint()
            path, asleep = branches[0].path, branches[0].asleep
            system.apply(path[-1])
        if not report.finding and (events := system.events()):
            before = system.fingerprint()
            system.apply(events[0])  # only to see where it leads
            graph.back.setdefault(system.fingerprint(), set()).add(before)
    finally:
        system.close()


def _arrive(
    system: System,
    path: tuple[str, ...],
    asleep: frozenset[str],
    before: object,
    report: Report,
    graph: _Graph,
    must_end: bool,
) -> list[str]:
    """Look at the state that a path leads to; returns the events to be tried there."""
    if faults := system.faults():
        report.finding, report.schedule = faults[0], path
        return []
    state, events = system.fingerprint(), system.events()
    report.num_transitions += bool(path)
    graph.back.setdefault(state, set()).add(before)
    if state in graph.paths:
        untried = [event for event in events if event in graph.asleep[state] - asleep]
        graph.asleep[state] &= asleep
        return untried
    graph.paths[state] = path
    graph.asleep[state] = asleep
    report.num_states += 1
    report.longest = max(report.longest, len(path))
    if system.is_done():
        graph.done.add(state)
    elif not events and must_end:
        report.finding, report.schedule = "it rests before its end", path
    return [event for event in events if event not in asleep]
