"""The page for on-call: are we healthy, are we fast, what is saturated."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import OF_NAMESPACE, TIMES, TOKENS_PER_S, mean, quantiles, rate

_C = "specdec_coordinator"
_OF = OF_NAMESPACE
_ROLES = ("target", "draft")
_GOOD_ABOVE_ZERO = ((None, "red"), (1, "green"))
_BAD_ABOVE_ZERO = ((None, "green"), (1, "red"))


def overview() -> dict[str, Any]:
    """Return the dashboard."""
    return dashboard(
        "specdec-overview",
        "specdec / Overview",
        "For on-call: healthy, fast, saturated? The other pages show the causes.",
        [
            Row("Are we healthy?", _healthy()),
            Row("Are we fast?", _fast()),
            Row("What is saturated?", _saturated()),
            Row("What runs?", _running()),
        ],
    )


def _healthy() -> list[Panel]:
    return [
        Panel(
            "Failing requests",
            "Share of requests of the last 5 minutes that ended with a fault of the server, in the worst namespace. "
            "The objective is 0.1%.",
            {"failing": f"max(specdec:request_errors:ratio_rate5m{_OF})"},
            "percentunit",
            "stat",
            4,
            ((None, "green"), (0.001, "orange"), (0.0144, "red")),
            "SpecdecErrorBudgetBurnFast",
        ),
        Panel(
            "Error budget burn, 1 h",
            "Pace at which the error budget of 30 days is spent; 1 spends it in exactly 30 days, 14.4 pages.",
            {"pace": f"max(specdec:request_errors:ratio_rate1h{_OF}) / 0.001"},
            TIMES,
            "stat",
            4,
            ((None, "green"), (1, "orange"), (14.4, "red")),
            "SpecdecErrorBudgetBurnSlow",
        ),
        Panel(
            "Ready targets",
            "Targets that the worst-off coordinator can use; at 0 its requests fail or wait.",
            {"targets": f'min({_C}_replicas{{role="target",state="ready",{_OF[1:]})'},
            "short",
            "stat",
            4,
            _GOOD_ABOVE_ZERO,
            "SpecdecTargetTierDown",
        ),
        Panel(
            "Ready drafts",
            "Drafts that the worst-off coordinator can use; at 0 requests are answered by plain decoding.",
            {"drafts": f'min({_C}_replicas{{role="draft",state="ready",{_OF[1:]})'},
            "short",
            "stat",
            4,
            ((None, "orange"), (1, "green")),
            "SpecdecDraftTierDown",
        ),
        Panel(
            "Incompatible replicas",
            "Replicas that coordinators refuse: another model or tokenizer, or in use under another address.",
            {"replicas": f'sum({_C}_replicas{{state="incompatible",{_OF[1:]})'},
            "short",
            "stat",
            4,
            _BAD_ABOVE_ZERO,
            "SpecdecReplicaIncompatible",
        ),
        Panel(
            "Token mismatches, 1 h",
            "Verdicts whose tokens differ from delivered ones. It must be 0: otherwise output may be wrong.",
            {"mismatches": f"sum(increase({_C}_token_mismatches_total{_OF}[1h]))"},
            "short",
            "stat",
            4,
            _BAD_ABOVE_ZERO,
            "SpecdecTokenMismatches",
        ),
        Panel(
            "Requests by outcome",
            "Ended requests per second, by gRPC code. UNAVAILABLE, INTERNAL, UNKNOWN and DATA_LOSS are faults of the "
            "server; the others are the client's faults, or missing capacity.",
            {"{{outcome}}": rate(f"{_C}_requests_total{_OF}", "outcome")},
            "reqps",
            width=8,
        ),
        Panel(
            "Losses and repairs",
            "Sessions that lost their draft, sessions opened again, streams to replicas opened again, journal errors. "
            "Clients lose only time. Peaks are restarts; a steady rate is a fault to look for.",
            {
                "draft lost": rate(f"{_C}_draft_fallbacks_total{_OF}"),
                "sessions reopened": rate(f"{_C}_session_reopens_total{_OF}"),
                "streams reconnected": rate(f"{_C}_stream_reconnects_total{_OF}"),
                "journal errors": rate(f"{_C}_journal_errors_total{_OF}"),
            },
            "ops",
            width=8,
            alert="SpecdecDraftFallbacks",
        ),
        Panel(
            "Redis answers",
            "Whether Redis answered each coordinator's last operation. While it does not, streams continue without a "
            "journal.",
            {"{{instance}}": f"{_C}_store_up{_OF}"},
            width=8,
            alert="SpecdecJournalFailing",
            words={0: "no", 1: "yes"},
        ),
    ]


def _fast() -> list[Panel]:
    return [
        Panel(
            "Time to first token",
            "Time from a request's arrival to its first token, waiting included. If it rises, see *Wait for a place*, "
            "then *Sessions waiting for a first step*, then the targets' page.",
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
            "Request duration",
            "Time from arrival to the end of the stream, for admitted requests.",
            quantiles(f"{_C}_request_seconds", _OF),
            "s",
        ),
        Panel(
            "Output tokens",
            "Tokens sent to clients per second, by origin; draft tokens are accepted ones.",
            {"{{origin}}": rate(f"{_C}_tokens_total{_OF}", "origin")},
            TOKENS_PER_S,
            width=12,
        ),
        Panel(
            "Speed-up over plain decoding",
            "Time of plain decoding for the same tokens over the time taken; below 1 speculation costs more than it "
            "gains.",
            {"{{instance}}": f"specdec:speedup:ratio_rate5m{_OF}"},
            TIMES,
            width=12,
            steps=((None, "red"), (1, "transparent")),
            alert="SpecdecSpeculationNotPaying",
        ),
    ]


def _saturated() -> list[Panel]:
    return [
        Panel(
            "Requests",
            "Running requests, and requests that wait for a place. If some always wait, add targets or raise "
            "max_running.",
            {"running": f"sum({_C}_requests_running{_OF})", "waiting": f"sum({_C}_queue_length{_OF})"},
            alert="SpecdecRequestsWait",
        ),
        Panel(
            "Not admitted",
            "Refused requests per second, by cause: overloaded and queue_timeout are missing capacity; quota and "
            "concurrency are a tenant's limits.",
            {"{{cause}}": rate(f"{_C}_admission_rejects_total{_OF}", "cause")},
            "reqps",
            alert="SpecdecAdmissionRejects",
        ),
        Panel("Wait for a place", "Mean time in the queue.", {"mean": mean(f"{_C}_queue_seconds", _OF)}, "s"),
        Panel(
            "Sessions waiting for a first step",
            "Waiting sessions by target and draft; above 0 for minutes means that the tier is too small.",
            {
                "target {{instance}}": f"specdec_target_queue_length{_OF}",
                "draft {{instance}}": f"specdec_draft_queue_length{_OF}",
            },
            width=12,
            alert="SpecdecTargetSaturated",
        ),
        Panel(
            "KV cache in use",
            "Share of KV blocks in use; free blocks that cache a prefix do not count. Above 90% is pressure.",
            {"{{tier}} {{instance}}": f"specdec:kv_used:ratio{_OF}"},
            "percentunit",
            width=12,
            steps=((None, "transparent"), (0.9, "red")),
            alert="SpecdecKvPressure",
        ),
    ]


def _running() -> list[Panel]:
    return [
        Panel(
            "Versions",
            "Processes by service and version of specdec. If two versions run for longer than a roll-out, finish it or "
            "roll back.",
            {"": f"count by (namespace, service, version, python) (specdec_build_info{_OF})"},
            kind="table",
            width=12,
            alert="SpecdecVersionSkew",
        ),
        Panel(
            "Models",
            "Replicas by served model. All of one role should be equal, and the tokenizers of both roles.",
            {
                "": "count by (namespace, role, model, dtype, device, tokenizer, numerics_id) ("
                + " or ".join(f'label_replace(specdec_{role}_info{_OF}, "role", "{role}", "", "")' for role in _ROLES)
                + ")"
            },
            kind="table",
            width=12,
            alert="SpecdecReplicaIncompatible",
        ),
        Panel(
            "Certificates expire in",
            "Time left to the certificate in use, by its use; empty without TLS. A renewal should raise it before a "
            "week, or a fifth of the certificate's lifetime, is left.",
            {"{{instance}} {{use}}": f"specdec_tls_certificate_expiry_timestamp_seconds{_OF} - time()"},
            "s",
            width=12,
            alert="SpecdecCertificateExpiresSoon",
        ),
        Panel(
            "TLS files refused",
            "Whether the files on disk are unusable, so that the last good ones stay in use; empty without TLS.",
            {"{{instance}} {{use}}": f"specdec_tls_files_refused{_OF}"},
            width=12,
            words={0: "no", 1: "yes"},
            alert="SpecdecCertificateRefused",
        ),
    ]
