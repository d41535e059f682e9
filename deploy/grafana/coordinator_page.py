"""The page on coordinators."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import OF_INSTANCE, TOKENS_PER_S, mean, quantiles, rate, ratio

_C = "specdec_coordinator"
_OF = OF_INSTANCE


def coordinator() -> dict[str, Any]:
    """Return the dashboard."""
    return dashboard(
        "specdec-coordinator",
        "specdec / Coordinators",
        "Requests of clients, and the coordinators' links to replicas.",
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
            "Ended requests per second, by gRPC code. UNAVAILABLE, INTERNAL, UNKNOWN and DATA_LOSS are faults of the "
            "server and spend the error budget; the others are the client's faults, or missing capacity.",
            {"{{outcome}}": rate(f"{_C}_requests_total{_OF}", "outcome")},
            "reqps",
            alert="SpecdecErrorBudgetBurnFast",
        ),
        Panel(
            "Requests running and waiting",
            "Requests by coordinator. If requests always wait, capacity is missing or max_running is too low.",
            {
                "running {{instance}}": f"{_C}_requests_running{_OF}",
                "waiting {{instance}}": f"{_C}_queue_length{_OF}",
            },
            alert="SpecdecRequestsWait",
        ),
        Panel(
            "Not admitted",
            "Requests refused per second, by cause: the queue is full (overloaded) or too slow (queue_timeout), or a "
            "tenant has used up its own limit (quota, concurrency).",
            {"{{cause}}": rate(f"{_C}_admission_rejects_total{_OF}", "cause")},
            "reqps",
            alert="SpecdecAdmissionRejects",
        ),
        Panel(
            "Time to first token",
            "Time from a request's arrival to its first token. If it rises, compare *Wait for a place*, then the "
            "targets' own time to first token.",
            quantiles(f"{_C}_time_to_first_token_seconds", _OF),
            "s",
        ),
        Panel(
            "Time between tokens",
            "Time between tokens of a choice; the n tokens of a burst share its gap.",
            quantiles(f"{_C}_inter_token_seconds", _OF),
            "s",
        ),
        Panel(
            "Wait for a place",
            "Time in the queue of requests that got a place. It is part of the time to first token.",
            quantiles(f"{_C}_queue_seconds", _OF),
            "s",
        ),
        Panel(
            "Prompt tokens",
            "Prompt tokens of admitted requests per second: all, and those in a target's prefix cache, which cost "
            "nothing.",
            {"prompt": rate(f"{_C}_prompt_tokens_total{_OF}"), "cached": rate(f"{_C}_cached_tokens_total{_OF}")},
            TOKENS_PER_S,
        ),
        Panel(
            "Prompt found in a prefix cache",
            "Share of prompt tokens in a target's prefix cache. Conversations should find their earlier turns; if they "
            "do not, they are routed to other targets, or their blocks are evicted.",
            {"cached": ratio(f"{_C}_cached_tokens_total{_OF}", f"{_C}_prompt_tokens_total{_OF}")},
            "percentunit",
        ),
        Panel(
            "Output tokens by origin",
            "Tokens sent to clients per second. Draft tokens are accepted ones; if all are decode, speculation is off.",
            {"{{origin}}": rate(f"{_C}_tokens_total{_OF}", "origin")},
            TOKENS_PER_S,
        ),
    ]


def _replicas() -> list[Panel]:
    return [
        Panel(
            "Ready replicas",
            "Replicas that each coordinator can use. Without a ready target requests fail; without a draft they are "
            "slower.",
            {"{{role}} {{instance}}": f'{_C}_replicas{{state="ready",{_OF[1:]}'},
            width=12,
            alert="SpecdecTargetTierDown",
        ),
        Panel(
            "Replicas that are not ready",
            "Replicas by role and state; the largest count of any coordinator. Draining is planned; ejected and "
            "probation follow repeated failures; incompatible ones serve another model. The coordinator's log has the "
            "reason.",
            {"{{role}} {{state}}": f'max by (role, state) ({_C}_replicas{{state!="ready",{_OF[1:]})'},
            width=12,
            alert="SpecdecReplicaIncompatible",
        ),
        Panel(
            "Open sessions",
            "Sessions by role of the replica and coordinator. If drafts have fewer than targets, some decode plainly.",
            {"{{role}} {{instance}}": f"{_C}_sessions{_OF}"},
            width=12,
        ),
        Panel(
            "Repairs",
            "Sessions and streams opened again, per second, by role. Clients lose only time; a steady rate means that "
            "replicas restart or the network drops streams.",
            {
                "session {{role}}": rate(f"{_C}_session_reopens_total{_OF}", "role"),
                "stream {{role}}": rate(f"{_C}_stream_reconnects_total{_OF}", "role"),
            },
            "ops",
            width=12,
        ),
    ]


def _redis() -> list[Panel]:
    return [
        Panel(
            "Redis answers",
            "Whether Redis answered the last operation. While it does not answer, each coordinator works alone. "
            "Without redis_url the value is always yes.",
            {"{{instance}}": f"{_C}_store_up{_OF}"},
            words={0: "no", 1: "yes"},
            alert="SpecdecJournalFailing",
        ),
        Panel(
            "Requests not in the journal",
            "Requests without a journal: if their coordinator is lost, clients can resume them only with the tokens "
            "already received. They join the journal when Redis is back.",
            {"{{instance}}": f"{_C}_requests_unjournalled{_OF}"},
        ),
        Panel(
            "Journal operations that failed",
            "Failed operations per second. While Redis does not answer, few are tried.",
            {"failed": rate(f"{_C}_journal_errors_total{_OF}")},
            "ops",
        ),
        Panel(
            "Journal latency",
            "Time of one journal operation in Redis. A request waits for two: before its admission, and at its end. "
            "Above redis_timeout_s operations fail.",
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
            "Failed or late operations per second.",
            {"{{operation}}": rate(f"{_C}_store_errors_total{_OF}", "operation")},
            "ops",
        ),
    ]


def _output() -> list[Panel]:
    return [
        Panel(
            "Token mismatches",
            "Verdicts per second whose tokens differ from delivered ones. It must be 0: otherwise output may be wrong.",
            {"mismatches": rate(f"{_C}_token_mismatches_total{_OF}")},
            "ops",
            alert="SpecdecTokenMismatches",
        ),
    ]


def _processes() -> list[Panel]:
    return [
        Panel(
            "Serving processes",
            "Processes that serve behind the port; normally num_processes.",
            {"{{instance}}": f"{_C}_processes{_OF}"},
            alert="SpecdecCoordinatorDown",
        ),
        Panel(
            "Processes that ended",
            "Processes that ended by themselves in the last 15 minutes, with their streams, and were restarted. Only "
            "with num_processes above 1.",
            {"{{instance}}": f"increase({_C}_process_restarts_total{_OF}[15m])"},
            alert="SpecdecCoordinatorProcessesRestart",
        ),
    ]
