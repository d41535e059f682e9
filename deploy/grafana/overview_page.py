"""The page for who is on call: are we healthy, are we fast, what is saturated."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import mean, quantiles, rate, rate_or_zero

_C = "specdec_coordinator"
_GOOD_ABOVE_ZERO = ((None, "red"), (1, "green"))
_BAD_ABOVE_ZERO = ((None, "green"), (1, "red"))


def overview() -> dict[str, Any]:
    """Return the dashboard."""
    return dashboard(
        "specdec-overview",
        "specdec / Overview",
        "For on-call: healthy, fast, saturated? The other pages tell why.",
        [Row("Are we healthy?", _healthy()), Row("Are we fast?", _fast()), Row("What is saturated?", _saturated())],
    )


def _healthy() -> list[Panel]:
    return [
        Panel(
            "Failing requests",
            "Share of requests of the last 5 minutes that ended with a fault of the server. The objective is 0.1%.",
            {"failing": "specdec:request_errors:ratio_rate5m"},
            "percentunit",
            "stat",
            4,
            ((None, "green"), (0.001, "orange"), (0.0144, "red")),
        ),
        Panel(
            "Error budget burn, 1 h",
            "Pace at which the error budget of 30 days is spent; 1 spends it in exactly 30 days, 14.4 pages.",
            {"pace": "specdec:request_errors:ratio_rate1h / 0.001"},
            "short",
            "stat",
            4,
            ((None, "green"), (1, "orange"), (14.4, "red")),
        ),
        Panel(
            "Ready targets",
            "Targets that the worst-off coordinator can use.",
            {"targets": f'min({_C}_replicas{{role="target",state="ready"}})'},
            "short",
            "stat",
            4,
            _GOOD_ABOVE_ZERO,
        ),
        Panel(
            "Ready drafts",
            "Drafts that the worst-off coordinator can use; at 0 requests are answered by plain decoding.",
            {"drafts": f'min({_C}_replicas{{role="draft",state="ready"}})'},
            "short",
            "stat",
            4,
            ((None, "orange"), (1, "green")),
        ),
        Panel(
            "Incompatible replicas",
            "Replicas that coordinators refuse: another model or tokenizer, or in use under another address.",
            {"replicas": f'sum({_C}_replicas{{state="incompatible"}})'},
            "short",
            "stat",
            4,
            _BAD_ABOVE_ZERO,
        ),
        Panel(
            "Token mismatches, 1 h",
            "Verdicts whose overlap differed from what was delivered. Must be 0.",
            {"mismatches": f"sum(increase({_C}_token_mismatches_total[1h]))"},
            "short",
            "stat",
            4,
            _BAD_ABOVE_ZERO,
        ),
        Panel(
            "Requests by outcome",
            "Requests that ended, per second, by gRPC code.",
            {"{{outcome}}": rate(f"{_C}_requests_total", "outcome")},
            "reqps",
            width=12,
        ),
        Panel(
            "Losses and repairs",
            "Sessions that lost their draft, sessions opened again, streams to replicas opened again, journal errors.",
            {
                "draft lost": rate_or_zero(f"{_C}_draft_fallbacks_total"),
                "sessions reopened": rate_or_zero(f"{_C}_session_reopens_total"),
                "streams reconnected": rate_or_zero(f"{_C}_stream_reconnects_total"),
                "journal errors": rate(f"{_C}_journal_errors_total"),
            },
            "ops",
            width=12,
        ),
    ]


def _fast() -> list[Panel]:
    return [
        Panel(
            "Time to first token",
            "From a request's arrival to its first token, waiting included.",
            quantiles(f"{_C}_time_to_first_token_seconds"),
            "s",
        ),
        Panel(
            "Time between tokens",
            "Of a choice; tokens that come as a burst of n share its gap.",
            quantiles(f"{_C}_inter_token_seconds"),
            "s",
        ),
        Panel(
            "Request duration",
            "From arrival to the end of the stream.",
            quantiles(f"{_C}_request_seconds"),
            "s",
        ),
        Panel(
            "Output tokens",
            "Tokens sent to clients per second, by origin: draft tokens are those that speculation won.",
            {"{{origin}}": rate(f"{_C}_tokens_total", "origin")},
            "short",
            width=12,
        ),
        Panel(
            "Speed-up over plain decoding",
            "Time that plain decoding would have taken for the same tokens, by the time taken; below 1 it costs.",
            {"{{instance}}": "specdec:speedup:ratio_rate5m"},
            "short",
            width=12,
        ),
    ]


def _saturated() -> list[Panel]:
    return [
        Panel(
            "Requests",
            "Requests that run, and requests that wait for a place.",
            {"running": f"sum({_C}_requests_running)", "waiting": f"sum({_C}_queue_length)"},
        ),
        Panel(
            "Not admitted",
            "Requests refused per second, by cause.",
            {"{{cause}}": rate_or_zero(f"{_C}_admission_rejects_total", "cause")},
            "reqps",
        ),
        Panel("Wait for a place", "Mean time in the queue.", {"mean": mean(f"{_C}_queue_seconds")}, "s"),
        Panel(
            "Sessions waiting for a first step",
            "By target and draft; above 0 for minutes means that the tier is too small.",
            {
                "target {{instance}}": "specdec_target_queue_length",
                "draft {{instance}}": "specdec_draft_queue_length",
            },
            width=12,
        ),
        Panel(
            "KV cache in use",
            "Share of KV blocks in use; free blocks that cache a prefix do not count. Above 90% is pressure.",
            {"{{tier}} {{instance}}": "specdec:kv_used:ratio"},
            "percentunit",
            width=12,
        ),
    ]
