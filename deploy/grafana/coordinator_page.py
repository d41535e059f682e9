"""The page on coordinators."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import mean, quantiles, rate, rate_or_zero, ratio

_C = "specdec_coordinator"
_OF = '{instance=~"$instance"}'


def coordinator() -> dict[str, Any]:
    """Return the dashboard."""
    return dashboard(
        "specdec-coordinator",
        "specdec / Coordinators",
        "What clients see, and the coordinators' links to replicas.",
        [
            Row("Clients", _clients()),
            Row("Replicas", _replicas()),
            Row("Redis", _redis()),
            Row("Output and processes", [*_output(), *_processes()]),
        ],
        f"{_C}_requests_running",
    )


def _clients() -> list[Panel]:
    return [
        Panel(
            "Requests by outcome",
            "Requests that ended, per second, by gRPC code.",
            {"{{outcome}}": rate(f"{_C}_requests_total{_OF}", "outcome")},
            "reqps",
        ),
        Panel(
            "Requests running and waiting",
            "By coordinator.",
            {
                "running {{instance}}": f"{_C}_requests_running{_OF}",
                "waiting {{instance}}": f"{_C}_queue_length{_OF}",
            },
        ),
        Panel(
            "Not admitted",
            "Requests refused per second, by cause.",
            {"{{cause}}": rate_or_zero(f"{_C}_admission_rejects_total{_OF}", "cause")},
            "reqps",
        ),
        Panel(
            "Time to first token",
            "From a request's arrival to its first token, waiting included.",
            quantiles(f"{_C}_time_to_first_token_seconds", _OF),
            "s",
        ),
        Panel(
            "Time between tokens",
            "Of a choice; tokens that come as a burst of n share its gap.",
            quantiles(f"{_C}_inter_token_seconds", _OF),
            "s",
        ),
        Panel("Wait for a place", "Time in the queue.", quantiles(f"{_C}_queue_seconds", _OF), "s"),
        Panel(
            "Prompt tokens",
            "Of admitted requests, per second.",
            {"prompt": rate(f"{_C}_prompt_tokens_total{_OF}"), "cached": rate(f"{_C}_cached_tokens_total{_OF}")},
        ),
        Panel(
            "Prompt found in a prefix cache",
            "Share of prompt tokens that a target had in its prefix cache.",
            {"cached": ratio(f"{_C}_cached_tokens_total{_OF}", f"{_C}_prompt_tokens_total{_OF}")},
            "percentunit",
        ),
        Panel(
            "Output tokens by origin",
            "Per second.",
            {"{{origin}}": rate(f"{_C}_tokens_total{_OF}", "origin")},
        ),
    ]


def _replicas() -> list[Panel]:
    return [
        Panel(
            "Replicas by state",
            "As each coordinator sees them.",
            {"{{role}} {{state}} {{instance}}": f"{_C}_replicas{_OF}"},
        ),
        Panel("Open sessions", "By role of the replica.", {"{{role}} {{instance}}": f"{_C}_sessions{_OF}"}),
        Panel(
            "Repairs",
            "Sessions and streams opened again, per second, by role.",
            {
                "session {{role}}": rate_or_zero(f"{_C}_session_reopens_total{_OF}", "role"),
                "stream {{role}}": rate_or_zero(f"{_C}_stream_reconnects_total{_OF}", "role"),
            },
            "ops",
        ),
    ]


def _redis() -> list[Panel]:
    return [
        Panel(
            "Redis answers",
            "1: the last operation that reached it was answered; 0: it is away, each coordinator goes on by itself. "
            "Always 1 without Redis.",
            {"{{instance}}": f"{_C}_store_up{_OF}"},
        ),
        Panel(
            "Requests not in the journal",
            "If their coordinator is lost, clients can resume them only with the tokens already received. "
            "They join when Redis is back.",
            {"{{instance}}": f"{_C}_requests_unjournalled{_OF}"},
        ),
        Panel(
            "Journal operations that failed",
            "Per second. Few are tried while Redis is away.",
            {"failed": rate(f"{_C}_journal_errors_total{_OF}")},
            "ops",
        ),
        Panel(
            "Journal latency",
            "Time of one journal operation in Redis. A request waits for two: before its admission, and at its end.",
            quantiles(f"{_C}_journal_seconds", _OF),
            "s",
        ),
        Panel(
            "Redis latency by operation",
            "Mean time of an operation.",
            {"{{operation}}": mean(f"{_C}_store_operation_seconds", _OF, "operation")},
            "s",
        ),
        Panel(
            "Redis errors by operation",
            "Operations that failed or were not answered in time, per second.",
            {"{{operation}}": rate_or_zero(f"{_C}_store_errors_total{_OF}", "operation")},
            "ops",
        ),
    ]


def _output() -> list[Panel]:
    return [
        Panel(
            "Token mismatches",
            "Verdicts whose overlap differed from what was delivered, per second. Must be 0.",
            {"mismatches": rate(f"{_C}_token_mismatches_total{_OF}")},
            "ops",
        ),
    ]


def _processes() -> list[Panel]:
    return [
        Panel(
            "Serving processes",
            "Processes behind the port that serve: num_processes of them, when all is well.",
            {"{{instance}}": f"{_C}_processes{_OF}"},
        ),
        Panel(
            "Processes that ended",
            "In the last 15 minutes, without being told to; each took its streams with it, and was started again. "
            "Only where num_processes is above 1.",
            {"{{instance}}": f"increase({_C}_process_restarts_total{_OF}[15m])"},
        ),
    ]
