"""What is done to a fleet, and when: a pure function of a seed, so that a run can be repeated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

from tests.adversary.topology import PATHS, REDIS, ROLES, Topology

KILLS = ("kill-group", "kill-engine", "kill-servicer", "kill-child")
STOPS = ("stop-group", "stop-engine", "stop-servicer", "stop-child", "stop-supervisor")
PARTS = {
    "target": ("group", "engine", "servicer"),
    "draft": ("group", "engine", "servicer"),
    "coordinator": ("group",),
    "gateway": ("group",),
}
"""What can be killed and stopped of a service."""
CHILD_KINDS = ("kill-child", "stop-child", "stop-supervisor")
"""Of a coordinator of several processes."""
HOSTS = ("slow-host", "starved-host", "full-disk")
SILENCES = ("partition", "one-way-to", "one-way-from")
SLOWNESSES = ("delay", "trickle", "lossy")
RESET = "reset"
LASTING_IN_SHORT = "stop-engine"
REDIS_FAULTS = ("redis-kill", "redis-empty", "redis-freeze", "redis-past", "redis-full")
CLOCKS = ("redis-clock-forth", "redis-clock-back")
"""Its clock jumps by an hour, and back when the fault is over."""
PRIMARY_FAULTS = ("primary-kill", "primary-freeze", "redis-empty")
"""Of a Redis with a sentinel."""
DIRECT = "draft>target"
GATEWAY_TIER = "gateway>coordinator"
"""Only of a fleet with gateways."""
LINK_TIERS = ("client>coordinator", "coordinator>target", "coordinator>draft", DIRECT, f"service>{REDIS}")
RESTART_S = (0.5, 2.0)
BRIEF_S = (0.3, 5.0)
LASTING_S = (12.0, 16.0)
"""Longer than the 10 s within which streams are to go on: what heals by itself sooner proves no watchdog."""

_ENDS_OF_REDIS = ("redis-kill", "redis-past", "primary-kill")
NUM_DRAWS = 20
"""For two faults that do not befall one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    tier: str
    """What it befalls: a role, a kind of link, or redis."""
    at: str
    """The service, or a pattern of links in which * stands for anything."""
    heal_after_s: float
    """Until it is undone, or what was killed is started again; of redis-past: how old the state is that comes back."""

    @property
    def label(self) -> str:
        """Its row in the table."""
        return f"{self.kind} {self.tier}" if self.tier != REDIS else self.kind

    def cuts_off(self) -> str | None:
        """The service that streams cannot use while it lasts, if there is one."""
        if self.kind == "stop-supervisor" or self.kind == "full-disk":
            return None
        if self.kind in (*KILLS, *STOPS, *HOSTS):
            return self.at
        if self.kind in SILENCES and self.tier not in (f"service>{REDIS}", DIRECT):
            return self.at.rpartition(">")[2]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fault, or two at once."""

    index: int
    after_s: float
    """Wait since streams and services were whole again after the event before."""
    faults: tuple[Fault, ...]
    apart_s: float = 0.0
    """From the first fault to the second."""

    @property
    def label(self) -> str:
        """Its row in the table."""
        return " + ".join(sorted(fault.label for fault in self.faults))

    def describe(self) -> str:
        """One line for people."""
        what = [f"{f.label} at {f.at} for {f.heal_after_s:.1f} s" for f in self.faults]
        return f"#{self.index}: " + f", {self.apart_s:.1f} s later ".join(what)


def draw_path(seed: int) -> str:
    """The way of proposals in a run."""
    return random.Random(f"path {seed}").choice(list(PATHS))


def all_kinds(topology: Topology) -> list[tuple[str, str]]:
    """Every kind of fault with every tier that it can befall."""
    roles = (*ROLES, *(["gateway"] * (topology.num_gateways > 0)))
    processes = [(f"{what}-{part}", role) for what in ("kill", "stop") for role in roles for part in PARTS[role]]
    processes += [(kind, "coordinator") for kind in CHILD_KINDS if topology.num_processes > 1]
    tiers = [tier for tier in LINK_TIERS if tier != DIRECT or topology.path != "relayed"]
    tiers += [GATEWAY_TIER] * (topology.num_gateways > 0)
    if topology.has_sentinel:  # it leads past the proxy
        tiers.remove(f"service>{REDIS}")
    links = [(kind, tier) for kind in (*SILENCES, *SLOWNESSES, RESET) for tier in tiers]
    hosts = [(kind, role) for kind in HOSTS for role in roles if topology.has_hosts]
    redis = PRIMARY_FAULTS if topology.has_sentinel else (*REDIS_FAULTS, *(CLOCKS if topology.has_clock else ()))
    return [*processes, *hosts, *links, *((kind, REDIS) for kind in redis)]


def select_kinds(patterns: Collection[str], topology: Topology) -> list[tuple[str, str]]:
    """The kinds that match one of the patterns KIND or KIND:TIER, where * stands for anything; without patterns all.

    Raises:
        ValueError: a pattern matches nothing.
    """
    chosen, kinds = set(), all_kinds(topology)
    for pattern in patterns:
        kind, _, tier = pattern.partition(":")
        found = [pair for pair in kinds if fnmatchcase(pair[0], kind) and fnmatchcase(pair[1], tier or "*")]
        if not found:
            raise ValueError(
                f"no kind of fault is called {pattern}; there are {', '.join(sorted({kind for kind, _ in kinds}))}"
            )
        chosen.update(found)
    return [pair for pair in kinds if not patterns or pair in chosen]


def make_plan(
    seed: int,
    topology: Topology,
    *,
    kinds: Sequence[tuple[str, str]] | None = None,
    rounds: int = 1,
    num_pairs: int | None = None,
) -> list[Event]:
    """Every kind once per round, and pairs of kinds, in random order.

    Args:
        num_pairs: Pairs per round; None: half as many as kinds.
    """
    rng = random.Random(seed)
    kinds = all_kinds(topology) if kinds is None else kinds
    wanted: list[list[tuple[str, str]]] = []
    for _ in range(rounds):
        wanted += [[kind] for kind in kinds]
        pairs = len(kinds) // 2 if num_pairs is None else num_pairs
        wanted += [rng.sample(kinds, 2) for _ in range(pairs if len(kinds) > 1 else 0)]
    rng.shuffle(wanted)
    return [_event(rng, index, topology, pairs) for index, pairs in enumerate(wanted)]


def make_short_plan(seed: int, topology: Topology) -> list[Event]:
    """Every kind of fault once, each at some tier, two at a time, and brief; but one engine stops for longer than any
    stream may stand.

    What takes long goes together, so that all of it takes less than a minute where nothing else runs.
    """
    rng = random.Random(seed)
    tiers: dict[str, list[str]] = {}
    for kind, tier in all_kinds(topology):
        tiers.setdefault(kind, []).append(tier)
    chosen = {kind: (kind, rng.choice(options)) for kind, options in tiers.items()}
    chosen[LASTING_IN_SHORT] = (LASTING_IN_SHORT, "target")  # streams can do without drafts
    kills = [kind for kind in KILLS if kind in chosen]
    redis = [kind for kind, tier in chosen.values() if tier == REDIS]
    others = [kind for kind in chosen if kind not in (*kills, *redis, LASTING_IN_SHORT)]
    for kinds in (kills, redis, others):
        rng.shuffle(kinds)
    kills.sort(key=lambda kind: kind not in CHILD_KINDS)  # the last one must befall a draft
    # Beside a stopped target nothing else takes one away: nobody would be left, and streams might rightly stand.
    chosen[kills[-1]] = (kills[-1], "draft")
    # An odd one is alone.
    order = [*kills, LASTING_IN_SHORT, *itertools.chain(*zip(redis, others, strict=False)), *others[len(redis) :]]
    pairs = [order[first : first + 2] for first in range(0, len(order), 2)]
    rng.shuffle(pairs)
    return [
        _event(rng, index, topology, [chosen[kind] for kind in pair], brief=True) for index, pair in enumerate(pairs)
    ]


def _event(
    rng: random.Random, index: int, topology: Topology, kinds: Sequence[tuple[str, str]], *, brief: bool = False
) -> Event:
    for _ in range(NUM_DRAWS):
        faults = tuple(_fault(rng, topology, kind, tier, brief=brief) for kind, tier in kinds)
        if len(faults) == 1 or not _same_process(*faults):
            break
    else:
        faults = faults[:1]
    most_s = 0.1 if brief else 2.0
    return Event(index=index, after_s=rng.uniform(0.0, most_s), faults=faults, apart_s=rng.uniform(0.0, most_s / 2))


def _same_process(first: Fault, second: Fault) -> bool:
    """Whether the second has nothing left to befall."""
    return first.at == second.at and any(f.kind in (*KILLS, *_ENDS_OF_REDIS) for f in (first, second))


def _fault(rng: random.Random, topology: Topology, kind: str, tier: str, *, brief: bool) -> Fault:
    is_lasting = kind == LASTING_IN_SHORT if brief else rng.random() < 0.5
    lengths = LASTING_S if is_lasting else BRIEF_S
    if kind in KILLS:
        lengths = RESTART_S
    elif kind in SLOWNESSES or tier == REDIS:
        lengths = (0.3, 3.0) if brief else (0.5, 6.0)
    elif kind == RESET:
        lengths = (0.0, 0.0)
    heal_after_s = rng.uniform(*lengths)
    if tier == REDIS:
        at = REDIS
    elif ">" in tier:
        at = _links(rng, topology, tier)
    elif kind in CHILD_KINDS:
        at = topology.of(tier)[0]
    else:
        at = rng.choice(topology.of(tier))
    return Fault(kind=kind, tier=tier, at=at, heal_after_s=round(heal_after_s, 2))


def _links(rng: random.Random, topology: Topology, tier: str) -> str:
    """One link, or all that lead to one service; of Redis one or all."""
    source, destination = tier.split(">")
    is_one = rng.random() < 0.5
    if destination == REDIS:
        return f"{rng.choice(topology.users_of_redis) if is_one else '*'}>{REDIS}"
    sources = topology.clients if source == "client" else topology.of(source)
    return f"{rng.choice(sources) if is_one else source + '-*'}>{rng.choice(topology.of(destination))}"


def leaves_nobody(event: Event, topology: Topology) -> bool:
    """Whether an event cuts off all targets or all coordinators, so that streams wait for what comes back first."""
    cut = {fault.cuts_off() for fault in event.faults}
    return any(set(topology.of(role)) <= cut for role in ("target", "coordinator"))


def as_json(events: Sequence[Event]) -> list[dict[str, object]]:
    """The plan for a file."""
    return [asdict(event) for event in events]
