"""One line of the checklist."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FindingOutcome(StrEnum):
    """Of a line."""

    PASS = "pass"
    WARN = "warn"
    """It may cost speed or safety, or it could not be checked."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A line: a statement about the deployment, and whether it holds."""

    what: str
    outcome: FindingOutcome
    measured: str
    """The observation, with figures."""
    do: str = ""
    """The remedy; empty if none is needed."""


def passed(what: str, measured: str) -> Finding:
    """A line that passes."""
    return Finding(what=what, outcome=FindingOutcome.PASS, measured=measured)


def warned(what: str, measured: str, do: str) -> Finding:
    """A line with a warning."""
    return Finding(what=what, outcome=FindingOutcome.WARN, measured=measured, do=do)


def failed(what: str, measured: str, do: str) -> Finding:
    """A line that fails."""
    return Finding(what=what, outcome=FindingOutcome.FAIL, measured=measured, do=do)
