"""The page on security names, for each attacker, tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()


def rows() -> dict[str, list[str]]:
    """Attackers of the table, and the tests that are named for them."""
    table = PAGE.partition("## Under test")[2].partition("\n## ")[0]
    found = re.findall(r"(?m)^\| ([^|`]+) \| (`tests/[^|]+) \|$", table)
    return {attacker: re.findall(r"`([^`]+)`", tests) for attacker, tests in found}


def test_every_attacker_has_tests() -> None:
    section = PAGE.partition("## Attackers")[2].partition("\n## ")[0]
    attackers = re.findall(r"(?m)^\*\*([^*]+)\.\*\*", section)
    assert len(attackers) > 8
    assert list(rows()) == attackers
