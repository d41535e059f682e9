"""Divide CPU cores between the engine process and its servicer.

If the servicer works on a core that computes, every thread of the step waits for that core at the next barrier. So the
two share no core if there are several.
"""

from __future__ import annotations

from collections.abc import Iterable


def parse_cores(text: str) -> frozenset[int]:
    """Core numbers from a list such as 0-3,6. Raises ValueError that names the fault."""
    cores: set[int] = set()
    for part in text.split(","):
        first, separator, last = part.strip().partition("-")
        if not first.isdigit() or (separator and not last.isdigit()):
            raise ValueError(f"{text!r} is not auto, off or a list of cores such as 1-3,6")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"{part.strip()!r} is a falling range: write the lower core first")
        cores.update(range(low, high + 1))
    return frozenset(cores)


def split_cores(setting: str, available: Iterable[int]) -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """The cores of (engine, servicer); None: do not pin.

    `setting` is auto, off or a list. auto leaves the lowest eighth of the cores, at least one, to the servicer and the
    others to the engine; a single core is shared. Raises ValueError if a listed core is not available.
    """
    cores = sorted(available)
    if setting == "off" or (setting == "auto" and len(cores) < 2):
        return None, None
    if setting == "auto":
        engine = frozenset(cores[max(1, len(cores) // 8) :])
    else:
        engine = parse_cores(setting)
        missing = sorted(engine.difference(cores))
        if missing:
            raise ValueError(f"engine_cores: {missing} are not available: this process has the cores {cores}")
    return engine, (frozenset(cores) - engine) or None
