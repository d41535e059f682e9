"""Of a schedule that shows a violation, a shorter one that shows one, too."""

from __future__ import annotations

from collections.abc import Callable

from tests.protocol.runs.schedule import Action, Schedule

_MOST_TRIES = 200


def shrink(schedule: Schedule, is_bad: Callable[[Schedule], bool], *, most_tries: int = _MOST_TRIES) -> Schedule:
    """Leave out actions, many at once at first, while what is left `is_bad` (delta debugging: Zeller, 2002).

    A pause goes with its action, so that what follows comes earlier.
    """
    actions, num_tries = schedule.actions, 0
    length = max(1, len(actions) // 2)
    while True:
        start, has_shrunk = 0, False
        while start < len(actions) and num_tries < most_tries:
            fewer: tuple[Action, ...] = actions[:start] + actions[start + length :]
            num_tries += 1
            if is_bad(schedule.of(fewer)):
                actions, has_shrunk = fewer, True
            else:
                start += length
        if num_tries >= most_tries or (length == 1 and not has_shrunk):
            return schedule.of(actions)
        length = max(1, length // 2)
