"""Figures of passes: medians, quartiles and percentiles, by load, as tables and plots."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec.commands.measuring.served import Load, LoadRun
from specdec.commands.measuring.svg import PlotPoint, lines
from specdec.commands.measuring.tables import Table
from specdec.v1 import coordinator_pb2 as api

_PARTS = ("p50", "p90", "p99")
NOT_WAITED_FOR = "not ended when the run was over"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]} if values else {}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Percentiles by name (`p50`); empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{part}": ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in wanted}


def rows_of(passes: Sequence[LoadRun]) -> list[dict[str, Any]]:
    """One row for each load with speculation, and one without, in the order in which they were first run.

    Passes that ask for steps are left out, because they are not timed.
    """
    passes = [one for one in passes if not one.tells_steps]
    keys = list(dict.fromkeys((one.load, one.speculate) for one in passes))
    ordered = sorted(keys, key=lambda key: ([load for load, _ in keys].index(key[0]), not key[1]))
    return [_row(load, speculate, passes) for load, speculate in ordered]


def _row(load: Load, speculate: bool, passes: Sequence[LoadRun]) -> dict[str, Any]:
    own = [one for one in passes if one.load == load and one.speculate is speculate]
    whole = [one for one in own if one.elapsed_s]
    # An interrupted request neither ended nor failed.
    streams = [s for one in own for s in one.streams if one.elapsed_s is not None or s.ended_s is not None or s.failure]
    ended = [stream for stream in streams if stream.ended_s is not None]
    failures = Counter(stream.failure or NOT_WAITED_FOR for stream in streams if stream.ended_s is None)
    row: dict[str, Any] = {
        "load": str(load),
        "concurrency": load.concurrency or None,
        "rate": load.rate or None,
        "speculation": speculate,
        "num_runs": len(whole),
        "num_requests": len(streams),
        "num_failed": sum(failures.values()),
        "failures": dict(failures),
        "tokens_per_s": spread([sum(s.num_tokens for s in one.streams) / (one.elapsed_s or 1) for one in whole]),
        "requests_per_s": spread([_num_ended(one) / (one.elapsed_s or 1) for one in whole]),
        "first_token_ms": _ms([s.first_s for s in ended]),
        "inter_token_ms": percentiles([1e3 * gap for stream in ended for gap in stream.gaps_s], (50, 90, 99)),
        "end_to_end_ms": _ms([s.whole_s for s in ended]),
        "client_lag_ms": _ms([s.lag_s for s in ended]),
        "cached_prompt_tokens": sum(s.finished.usage.cached_tokens for s in ended if s.finished),
    }
    if speculate:
        row |= acceptance([s.finished.stats for s in ended if s.finished])
        row |= _against_plain(own, [one for one in passes if one.load == load and not one.speculate])
    return row


def _num_ended(one: LoadRun) -> int:
    return sum(stream.ended_s is not None for stream in one.streams)


def _ms(seconds: Sequence[float | None]) -> dict[str, float]:
    return percentiles([1e3 * value for value in seconds if value is not None])


def acceptance(stats: Sequence[api.SpeculationStats]) -> dict[str, Any]:
    """Acceptance over many requests, from the coordinator's statistics."""
    steps = sum(s.num_steps for s in stats)
    verify_steps = sum(s.num_verify_steps for s in stats)
    proposed, accepted = sum(s.num_proposed for s in stats), sum(s.num_accepted for s in stats)
    committed = sum(s.mean_acceptance_length * s.num_verify_steps for s in stats)
    verified = [sum(depth) for depth in itertools.zip_longest(*(s.verified_by_depth for s in stats), fillvalue=0)]
    by_depth = [sum(depth) for depth in itertools.zip_longest(*(s.accepted_by_depth for s in stats), fillvalue=0)]
    return {
        "mean_acceptance_length": committed / verify_steps if verify_steps else None,
        "accepted_share": accepted / proposed if proposed else None,
        "acceptance_by_depth": [a / v for a, v in zip(by_depth, verified, strict=False) if v],
        "hit_rate": sum(s.num_hits for s in stats) / steps if steps else None,
        "verify_ms_per_step": sum(s.verify_ms for s in stats) / steps if steps else None,
        "hold_off_ms_per_step": sum(s.hold_off_ms for s in stats) / steps if steps else None,
        "outside_ms_per_step": sum(s.outside_ms for s in stats) / steps if steps else None,
    }


def _against_plain(own: Sequence[LoadRun], plain: Sequence[LoadRun]) -> dict[str, Any]:
    """Ratio of each pass to the plain one of the same repeat, and the number of requests with equal tokens."""
    other = {one.repeat: one for one in plain if one.elapsed_s}
    pairs = [(one, other[one.repeat]) for one in own if one.elapsed_s and one.repeat in other]
    ratios = [ratio for fast, slow in pairs if (ratio := _ratio(fast, slow)) is not None]
    if not ratios:
        return {}
    streams = [two for fast, slow in pairs for two in zip(fast.streams, slow.streams, strict=False)]
    ended = [(a, b) for a, b in streams if a.ended_s is not None and b.ended_s is not None]
    return {
        "speedup": spread(ratios),
        "num_compared": len(ended),
        "num_equal": sum(a.token_ids == b.token_ids for a, b in ended),
    }


def _ratio(fast: LoadRun, slow: LoadRun) -> float | None:
    """Ratio of throughputs in a closed loop; of median request times in an open one, whose throughput is its rate."""
    if fast.load.rate:
        ours, theirs = (_ms([s.whole_s for s in one.streams]).get("p50") for one in (fast, slow))
        return theirs / ours if ours and theirs else None
    ours, theirs = (sum(s.num_tokens for s in one.streams) / (one.elapsed_s or 1) for one in (fast, slow))
    return ours / theirs if theirs else None


def tables_of(rows: Sequence[dict[str, Any]], title: str) -> list[Table]:
    """Tables of speed and times by load, and of acceptance and failures if there are any."""
    speed = Table(
        f"Speed, {title}",
        ("load", "speculation", "runs", "requests", "failed", "tokens/s", "requests/s", "speed-up"),
    )
    times = Table(
        f"Times in ms, {title}",
        ("load", "speculation", *(f"{name} {part}" for name in ("TTFT", "ITL", "whole") for part in _PARTS)),
    )
    accepted = Table(
        f"Acceptance, {title}",
        ("load", "tokens per verifying step", "of verified", "hits", "by depth 1, 2, ...", "same tokens as plain"),
    )
    failed = Table("Failures", ("load", "speculation", "why", "requests"))
    for row in rows:
        name = (row["load"], row["speculation"])
        speed.add(*name, row["num_runs"], row["num_requests"], row["num_failed"], row["tokens_per_s"],
                  row["requests_per_s"], row.get("speedup"))  # fmt: skip
        spreads = (row["first_token_ms"], row["inter_token_ms"], row["end_to_end_ms"])
        times.add(*name, *(one.get(part) for one in spreads for part in _PARTS))
        if row["speculation"]:
            depths = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
            same = f"{row['num_equal']} of {row['num_compared']}" if "num_equal" in row else None
            shares = (row["accepted_share"], row["hit_rate"])
            accepted.add(row["load"], row["mean_acceptance_length"], *map(percent, shares), depths, same)
        for why, count in row["failures"].items():
            failed.add(*name, why, count)
    speed.notes.append(
        "Medians and quartiles of the runs. Speed-up: tokens/s over those of the plain run of the same repeat; at a "
        "rate, the plain run's median request time over this run's."
    )
    times.notes.append(
        "TTFT: from the due time of a request to its first tokens. ITL: time between chunks per token of the later "
        "one. whole: from the due time to the end."
    )
    accepted.notes.append(
        "By depth: accepted share of the tokens verified there. The target verifies likely tokens only, so the share "
        "may rise with depth."
    )
    return [speed, times, *([accepted] if accepted.rows else []), *([failed] if failed.rows else [])]


def percent(share: float | None) -> str | None:
    """A share as text; None stays None."""
    return None if share is None else f"{share:.0%}"


def plots_of(rows: Sequence[dict[str, Any]], note: str) -> dict[str, str]:
    """Throughput, speed-up and times by load, and acceptance by depth, as SVG by name."""
    plots = {}
    for kind, x_name in (("concurrency", "requests at once"), ("rate", "requests per second, Poisson")):
        own = [row for row in rows if row[kind] and row["num_runs"]]
        if not own:
            continue
        tokens: dict[str, list[PlotPoint]] = {}
        speedup: list[PlotPoint] = []
        times: dict[str, dict[str, list[PlotPoint]]] = {"first_token_ms": {}, "inter_token_ms": {}, "end_to_end_ms": {}}
        for row in own:
            x, name = float(row[kind]), "speculation" if row["speculation"] else "plain"
            tokens.setdefault(name, []).append(PlotPoint.of(x, row["tokens_per_s"]))
            if "speedup" in row:
                speedup.append(PlotPoint.of(x, row["speedup"]))
            for figure, part in itertools.product(times, ("p50", "p99")):
                if part in row[figure]:
                    y = row[figure][part]
                    times[figure].setdefault(f"{name}, {part}", []).append(PlotPoint(x, y, y, y))
        plots[f"{kind}-tokens"] = lines("Tokens per second by load", note, x_name, "tokens/s", tokens, log_x=True)
        if speedup:
            plain = [PlotPoint(point.x, 1.0, 1.0, 1.0) for point in speedup]
            both = {"speculation / plain": speedup, "plain": plain}
            plots[f"{kind}-speedup"] = lines("Speed-up by load", note, x_name, "times plain", both, log_x=True)
        titles = {
            "first_token_ms": "Time to first token by load",
            "inter_token_ms": "Time between tokens by load",
            "end_to_end_ms": "Time of a whole request by load",
        }
        for figure, series in times.items():
            file = f"{kind}-{figure.removesuffix('_ms').replace('_', '-')}"
            plots[file] = lines(titles[figure], note, x_name, "ms", series, log_x=True)
    depths = {
        row["load"]: [
            PlotPoint(depth, share, share, share) for depth, share in enumerate(row["acceptance_by_depth"], 1)
        ]
        for row in rows
        if row.get("acceptance_by_depth")
    }
    if depths:
        plots["acceptance"] = lines("Acceptance by depth", note, "depth of the draft token", "accepted share", depths)
    return plots
