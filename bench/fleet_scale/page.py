"""The page of fleets by size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.fleet_scale.counts import Counts, record_bytes
from bench.fleet_scale.fleets import DRAFTS_PER_TARGET, OUTPUT, PHASES, PROMPT, TARGETS_PER_COORDINATOR, Result

_FLEETS = (
    "targets", "subset", "phase", "streams", "TTFT p99 ms", "ITL p99 ms", "fullest / mean", "moved", "refused calls",
    "failed", "peak of calls", "simulated in s",
)  # fmt: skip
_COUNTS = (
    "targets", "subset", "streams between services", "of a coordinator, most", "load reports to a coordinator per s",
    "loads it passes on per s", "before", "registry read, MB/s", "before", "its attempts per s, a third lost",
    "streams it opens at once when they are back",
)  # fmt: skip


def markdown(results: Sequence[Result], counted: Sequence[Counts]) -> str:
    """The page."""
    lost_s, back_s = PHASES["zone gone"][0], PHASES["zone back"][0]
    rows = [
        (
            result.case.num_targets,
            result.case.subset_size or "all",
            phase.name,
            f"{phase.num_streams:,}",
            f"{phase.first_token_p99_s * 1e3:.0f}",
            f"{phase.inter_token_p99_s * 1e3:.0f}",
            f"{phase.fullest:.2f}",
            f"{phase.num_moved:,}",
            f"{phase.num_refused:,}",
            f"{phase.num_failed:,}",
            f"{phase.peak:.1f}",
            f"{result.took_s:.0f}",
        )
        for result in results
        for phase in result.phases
    ]
    messages = [
        (
            each.num_targets,
            each.subset_size or "all",
            f"{each.num_links:,}",
            f"{each.most_links:,}",
            f"{each.reports_per_s:,.0f}",
            f"{each.passed_per_s:,.0f}",
            f"{each.former_passed_per_s:,.0f}",
            f"{each.read_mb_per_s:.2f}",
            f"{each.former_read_mb_per_s:.2f}",
            f"{each.attempts_per_s:,.0f}",
            f"{each.attaches:,}",
        )
        for each in counted
    ]
    return "\n".join(
        [
            "# What grows with a fleet",
            "",
            "**Predictions** by `python -m bench.fleet_scale`, but for the simulation's own time. 70B on four H200 "
            f"each by the roofline, {DRAFTS_PER_TARGET} 1B drafts for each target, acceptance 0.8, prompts of {PROMPT} "
            f"tokens and outputs of {OUTPUT}; a coordinator for {TARGETS_PER_COORDINATOR} targets. One of three zones "
            f"is lost at {lost_s:g} s, is noticed after 5 s, and serves again at {back_s:g} s. Peak: most calls in a "
            "tenth of a second over the mean before the loss.",
            "",
            *_table(_FLEETS, rows),
            "",
            "## Messages and records",
            "",
            f"Counted from the services' intervals; a record of the registry has {record_bytes()} bytes. Before: each "
            "load went to every draft, and the registry was read whole at each look, as it is now while it changes.",
            "",
            *_table(_COUNTS, messages),
            "",
        ]
    )


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names), *map(_row, rows)]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
