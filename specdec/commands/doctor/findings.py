"""One line of the checklist."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FindingOutcome(StrEnum):
    """Of a line."""

    PASS = "pass"
    WARN = "warn"
    """It may cost speed or safety, or it could not be found out from here."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found about one thing."""

    what: str
    outcome: FindingOutcome
    measured: str
    """What was seen, with figures."""
    do: str = ""
    """What to do about it; empty where there is nothing to do."""


def passed(what: str, measured: str) -> Finding:
    """A line that is as it should be."""
    return Finding(what=what, outcome=FindingOutcome.PASS, measured=measured)


def warned(what: str, measured: str, do: str) -> Finding:
    """A line to look at."""
    return Finding(what=what, outcome=FindingOutcome.WARN, measured=measured, do=do)


def failed(what: str, measured: str, do: str) -> Finding:
    """A line to mend."""
    return Finding(what=what, outcome=FindingOutcome.FAIL, measured=measured, do=do)
