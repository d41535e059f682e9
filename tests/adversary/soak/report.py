"""A soak for people."""

from __future__ import annotations

from tests.adversary.hosts.hosts import memory_text
from tests.adversary.soak.run import SoakResult
from tests.adversary.soak.slopes import MIB, Growth


def soak_text(result: SoakResult, command: str) -> str:
    """What was done, what grew, and what failed."""
    minutes = (result.times_s[-1] if result.times_s else 0.0) / 60
    counts = ", ".join(f"{count} {what}" for what, count in sorted(result.counts.items()))
    lines = [
        f"`{command}`: {minutes:.1f} minutes at {result.rate_per_s:.2f} requests/s, of {result.capacity_per_s:.2f}"
        f" answered per second at most; {result.num_tenants} tenants came and went,"
        f" {result.num_connections} connections; {counts}.",
        "",
        "Growth is the median slope (Theil and Sen) over the last two thirds, times their length.",
        "",
        "| what | median | least | most | growth | may grow | flat |",
        "|---|---|---|---|---|---|---|",
        *(_row(one) for one in result.growths),
        "",
    ]
    if result.memory:
        lines += [memory_text(result.memory), ""]
    if result.failures:
        lines += [f"## {len(result.failures)} failures", "", *(f"- {failure}" for failure in result.failures[:50]), ""]
    else:
        lines += ["No failure: nothing grew, and 90 s after the load no session, block or request was left.", ""]
    return "\n".join(lines)


def _row(one: Growth) -> str:
    is_bytes = one.name.endswith("_bytes")
    scale = MIB if is_bytes else 1
    name = one.name.replace("_bytes", " (MiB)") if is_bytes else one.name
    cells = [f"{value / scale:.4g}" for value in (one.median, one.least, one.most, one.growth, one.allowed)]
    return "| " + " | ".join([name, *cells, "yes" if one.is_flat else "**no**"]) + " |"
