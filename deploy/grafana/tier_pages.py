"""The pages on targets and drafts, with their common panels."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import OF_INSTANCE, TOKENS_PER_S, mean, quantiles, rate, ratio

_OF = OF_INSTANCE
_T = "specdec_target"
_D = "specdec_draft"


def target() -> dict[str, Any]:
    """Return the dashboard of targets."""
    constraints = Row("Constraints", [*_constraints(_T), _masks()])
    rows = [Row("Verification", [*_verification(), _device_gap()]), *_engine_rows(_T), constraints]
    return dashboard("specdec-target", "specdec / Targets", "Verification and plain decoding.", rows, f"{_T}_kv_blocks")


def draft() -> dict[str, Any]:
    """Return the dashboard of drafts."""
    rows = [Row("Drafting", _drafting()), *_engine_rows(_D), Row("Constraints", _constraints(_D))]
    return dashboard("specdec-draft", "specdec / Drafts", "Drafting.", rows, f"{_D}_kv_blocks")


def _verification() -> list[Panel]:
    return [
        Panel(
            "Committed tokens by origin",
            "Tokens per second. Draft tokens cost no step of their own; decode tokens are plain decoding.",
            {"{{origin}}": rate(f"{_T}_tokens_total{_OF}", "origin")},
            TOKENS_PER_S,
        ),
        Panel(
            "Tree nodes",
            "Nodes per second that were verified, and that were discarded, verified or not. Drafts work ahead on many "
            "outcomes, so many more are wasted than verified; that costs draft time, not target time.",
            {
                "verified": rate(f"{_T}_verified_nodes_total{_OF}"),
                "wasted": rate(f"{_T}_wasted_tokens_total{_OF}"),
            },
            TOKENS_PER_S,
        ),
        Panel(
            "Acceptance by depth",
            "Of the steps that verified a node at a depth, the share that accepted one. If it is low at depth 1, the "
            "draft model does not fit; if it falls steeply, proposals are too long.",
            {"depth {{depth}}": ratio(f"{_T}_accepted_tokens_total{_OF}", f"{_T}_proposed_tokens_total{_OF}", "depth")},
            "percentunit",
            alert="SpecdecLowAcceptance",
        ),
        Panel(
            "Verify step",
            "Time of a step that verified proposals. The difference from a plain step (*Step time*) is the cost of "
            "verification.",
            quantiles(f"{_T}_verify_seconds", _OF),
            "s",
        ),
        Panel(
            "Hold-off",
            "Time that a session's step waited for a draft; most do not wait. If it is near a step's time, drafts are "
            "too slow or too far.",
            quantiles(f"{_T}_hold_off_seconds", _OF),
            "s",
            alert="SpecdecSpeculationNotPaying",
        ),
        Panel(
            "Time to first token",
            "Time from a session's opening to its first token: waiting for a step, and prefill. If it is near the "
            "coordinators' own, the target is slow.",
            quantiles(f"{_T}_time_to_first_token_seconds", _OF),
            "s",
        ),
    ]


def _drafting() -> list[Panel]:
    return [
        Panel(
            "Time to a proposal",
            "Time from the arrival of a commit to the first proposal after it; targets wait for it.",
            quantiles(f"{_D}_draft_seconds", _OF),
            "s",
        ),
        Panel(
            "Draft tokens",
            "Tokens per second that were computed, and that were sent.",
            {
                "computed": rate(f"{_D}_drafted_tokens_total{_OF}"),
                "sent": rate(f"{_D}_tokens_total{_OF}"),
            },
            TOKENS_PER_S,
        ),
        Panel(
            "Proposal size",
            "Mean number of nodes of a proposal, by draft.",
            {"{{instance}}": mean(f"{_D}_proposal_tokens", _OF, "instance")},
        ),
    ]


def _engine_rows(prefix: str) -> list[Row]:
    return [
        Row("Steps", _steps(prefix)),
        Row("Sessions and KV cache", _sessions(prefix)),
        Row("Streams", _streams(prefix)),
        Row("Redis", _redis(prefix)),
    ]


def _steps(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Steps",
            "Steps per second, by kind of their rows.",
            {"{{kind}}": rate(f"{prefix}_steps_total{_OF}", "kind")},
            "ops",
        ),
        Panel(
            "Step time",
            "Mean time of a step, sampling included, by kind. It grows with the batch and the contexts; if it grows "
            "without them, other work runs on the device or its cores.",
            {"{{kind}}": mean(f"{prefix}_step_seconds", _OF, "kind")},
            "s",
        ),
        Panel(
            "Batch",
            "Mean rows (prompt tokens, decoded tokens, tree nodes) and sequences of a step.",
            {
                "rows": mean(f"{prefix}_step_tokens", _OF),
                "sequences": mean(f"{prefix}_step_sequences", _OF),
            },
        ),
    ]


def _sessions(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Sessions",
            "Sessions that are held, that take part in steps, and that wait for a first step. If some wait for "
            "minutes, KV blocks or max_batch_seqs are used up.",
            {
                "held {{instance}}": f"{prefix}_sessions{_OF}",
                "running {{instance}}": f"{prefix}_sessions_running{_OF}",
                "waiting {{instance}}": f"{prefix}_queue_length{_OF}",
            },
            alert="SpecdecTargetSaturated",
        ),
        Panel(
            "KV blocks in use",
            "Share in use, and share that is free but caches a prefix until it is needed. Above 90% in use, sequences "
            "are preempted next.",
            {
                "used {{instance}}": f"{prefix}_kv_blocks_used{_OF} / {prefix}_kv_blocks{_OF}",
                "cached {{instance}}": f"{prefix}_kv_blocks_cached{_OF} / {prefix}_kv_blocks{_OF}",
            },
            "percentunit",
            alert="SpecdecKvPressure",
        ),
        Panel(
            "Preemptions and rollbacks",
            "Preempted sequences, and rollbacks of tokens, per second. Preemptions repeat work; rollbacks are normal "
            "in speculation.",
            {
                "preemptions": rate(f"{prefix}_preemptions_total{_OF}"),
                "rollbacks": rate(f"{prefix}_rollbacks_total{_OF}"),
            },
            "ops",
        ),
        Panel(
            "Prefix cache",
            "Share of looked-up tokens that were in the prefix cache.",
            {"hits": ratio(f"{prefix}_prefix_cache_hits_total{_OF}", f"{prefix}_prefix_cache_queries_total{_OF}")},
            "percentunit",
            width=12,
        ),
        Panel(
            "Sessions opened",
            "Sessions per second, with reopened ones.",
            {"{{instance}}": rate(f"{prefix}_sessions_opened_total{_OF}", "instance")},
            "ops",
            width=12,
        ),
    ]


def _constraints(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Compiling constraints",
            "Time to compile a grammar, or to refuse it. Sessions wait for it.",
            quantiles(f"{prefix}_grammar_compile_seconds", _OF),
            "s",
            width=12,
        ),
        Panel(
            "Constraints known",
            "Share of the sessions with a constraint whose grammar was cached. It is low if clients send many "
            "different grammars.",
            {"hits": ratio(f"{prefix}_grammar_cache_hits_total{_OF}", f"{prefix}_grammar_cache_queries_total{_OF}")},
            "percentunit",
            width=12,
        ),
        Panel(
            "Constraints refused",
            "Sessions per second that were refused or ended because of their constraint. invalid and too_complex are "
            "clients' faults; busy means that too many grammars wait for compiling.",
            {"{{reason}}": rate(f"{prefix}_grammar_refusals_total{_OF}", "reason")},
            "ops",
            width=12,
        ),
    ]


def _device_gap() -> Panel:
    return Panel(
        "Gap between passes",
        "Time on a GPU's clock from the end of a decoding pass to the start of the next. Sampling runs in it; the rest "
        "is idle time or hold-off.",
        quantiles(f"{_T}_device_gap_seconds", _OF),
        "s",
        width=12,
    )


def _masks() -> Panel:
    return Panel(
        "Masks",
        "Mean time to fill a step's masks, and the part that the step waited for. Both are equal if masks are filled "
        "after the forward pass, as on a single core.",
        {"filling": mean(f"{_T}_mask_seconds", _OF), "waiting": mean(f"{_T}_mask_wait_seconds", _OF)},
        "s",
        width=12,
    )


def _streams(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Open streams",
            "Streams: one per connected coordinator process.",
            {"{{instance}}": f"{prefix}_open_streams{_OF}"},
        ),
        Panel(
            "Messages",
            "Relayed messages per second, by direction.",
            {"{{direction}}": rate(f"{prefix}_messages_total{_OF}", "direction")},
            "ops",
        ),
        Panel(
            "Bytes",
            "Relayed bytes per second, by direction.",
            {"{{direction}}": rate(f"{prefix}_message_bytes_total{_OF}", "direction")},
            "Bps",
        ),
        Panel(
            "Engine restarts",
            "Engines that ended, or were killed because they were stuck, in the last 15 minutes. Streams continued "
            "elsewhere.",
            {"{{instance}} {{cause}}": f"increase({prefix}_engine_restarts_total{_OF}[15m])"},
            alert="SpecdecEngineRestarts",
            width=12,
        ),
        Panel(
            "Silence of engines",
            "Time since an engine's last sign of life; it gives four per second.",
            {"{{instance}}": f"{prefix}_engine_silence_seconds{_OF}"},
            "s",
            width=12,
        ),
    ]


def _redis(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Redis answers",
            "Whether Redis answered the last operation. While it does not, the registration expires. Without redis_url "
            "the value is always yes.",
            {"{{instance}}": f"{prefix}_store_up{_OF}"},
            words={0: "no", 1: "yes"},
            alert="SpecdecReplicaCannotRegister",
            width=12,
        ),
        Panel(
            "Registrations that failed",
            "Failed renewals in Redis per second. Coordinators that use the replica continue.",
            {"{{instance}}": rate(f"{prefix}_announce_failures_total{_OF}", "instance")},
            "ops",
            width=12,
        ),
    ]
