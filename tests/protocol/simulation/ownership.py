"""A request has one owner: in the store at every moment, among coordinators as soon as the former one can know."""

from __future__ import annotations

from collections import defaultdict

from specdec.store.interface import RequestKey
from tests.protocol.simulation.safety import Violations
from tests.protocol.simulation.world import World

OVERLAP_S = 3.0
"""So long two coordinators that reach the store may decode one request: a lease of 2 s, three times renewed, and the
waits of a store that has just come back."""
_LOOK_S = 0.1
_Owner = tuple[int, str]
"""Generation of the lease, and name."""


class Ownership:
    """Notes a second owner."""

    def __init__(self, world: World, violations: Violations) -> None:
        self._world = world
        self._violations = violations
        self._in_store: dict[RequestKey, _Owner] = {}
        self._memory = world.store.memory
        self._since_s: dict[tuple[RequestKey, frozenset[str]], float] = {}
        """When two coordinators began to decode the same request."""
        self._next_look_s = 0.0

    def check_store(self) -> None:
        """Leases go from one owner to the next, never back, and never to two."""
        store = self._world.store
        if store.memory is not self._memory:  # it has lost what it knew
            self._memory = store.memory
            self._in_store.clear()
        for key, record in store.memory._state.requests.items():
            now = (record.generation, record.owner_id)
            before = self._in_store.get(key, now)
            is_right = now == before or now[0] > before[0]
            self._violations.check(is_right, "the lease of", key, "went from", before, "to", now)
            self._in_store[key] = now

    def check_coordinators(self) -> None:
        """Of two that decode one request, the former owner learns of it with its next write or renewal."""
        now_s = self._world.loop.time()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        rivals = self._rivals()
        self._since_s = {who: self._since_s.get(who, now_s) for who in rivals}
        for who, since_s in self._since_s.items():
            is_short = now_s - since_s <= OVERLAP_S
            self._violations.check(is_short, sorted(who[1]), "both decode", who[0].request_id, "for", OVERLAP_S, "s")

    def _rivals(self) -> list[tuple[RequestKey, frozenset[str]]]:
        """Those that have, or had, a lease: who began while the store was away may go on beside another one."""
        store = self._world.store
        if store.is_silent or store.is_deaf:
            return []
        owners: dict[RequestKey, set[str]] = defaultdict(set)
        for node in self._world.coordinators:
            if node.service is not None and not node.is_frozen and node.name not in store.unreached:
                here: set[RequestKey] = set()
                for entry in node.service._journal._upkeep.entries.values():
                    key = entry.request.key
                    if entry.last_lease is not None and entry.request.num_unfinished:
                        self._violations.check(key not in here, node.name, "decodes", key, "twice")
                        here.add(key)
                        owners[key].add(node.name)
        return [(key, frozenset(names)) for key, names in owners.items() if len(names) > 1]
