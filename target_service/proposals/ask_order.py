"""The order in which the target's drafters are asked for a session: by gain per second of a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from specdec.drafting.interface import Room
from specdec.target_service.pacing.expectations import Expectations
from specdec.target_service.policy.marginal_gains import Headroom
from specdec.target_service.policy.means import Mean
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.target_service.session import TargetSession


class AskOrder:
    """Mean times of calls, and the order of drafters. A drafter skipped in its turn is not asked for that step."""

    def __init__(self) -> None:
        self._costs_s: defaultdict[str, Mean] = defaultdict(Mean)

    def order(
        self, drafters: Iterable[DrafterInSession], room: Room, expectations: Expectations
    ) -> list[DrafterInSession]:
        """Drafters by falling gain per second; in rejection mode in the given order, which depends on no acceptance."""
        if room.is_chain:
            return list(drafters)
        return sorted(drafters, key=lambda drafter: -self._worth_per_s(drafter.name, room, expectations))

    def take(
        self,
        name: str,
        session: TargetSession,
        asked: set[str],
        room: Room,
        expectations: Expectations,
        least_worth: float,
    ) -> Headroom | None:
        """Give a drafter its turn for a session's next step; returns the headroom before its call.

        None: its turn is over or comes later, or a call is not worth its time.

        Args:
            asked: names of drafters whose turns of this step are over; a turn adds `name`.
            least_worth: tokens per second that the drafter must gain to have its turn now.
        """
        if name in asked or self._worth_per_s(name, room, expectations) < least_worth:
            return None
        asked.add(name)
        headroom = expectations.headroom(session)
        return (
            headroom if expectations.is_worth_asking(name, [(session, headroom)], self._costs_s[name].value) else None
        )

    def observe(self, name: str, elapsed_s: float) -> float:
        """Learn that a call took `elapsed_s`; returns the mean, in seconds."""
        self._costs_s[name].observe(elapsed_s)
        return self._costs_s[name].value

    def forget(self, name: str) -> None:
        """Drop the times of a drafter: another drafter has its name now."""
        self._costs_s.pop(name, None)

    def _worth_per_s(self, name: str, room: Room, expectations: Expectations) -> float:
        return expectations.worth_per_s(name, self._costs_s[name].value, room.depth)
