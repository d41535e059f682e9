"""The pages on targets and drafts: what they have in common, and what each adds."""

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
            "Per second. Draft tokens cost no step of their own; decode tokens are plain decoding.",
            {"{{origin}}": rate(f"{_T}_tokens_total{_OF}", "origin")},
            TOKENS_PER_S,
        ),
        Panel(
            "Tree nodes",
            "Per second: verified, and thrown away, verified or not. Drafts work ahead on many outcomes, so much more "
            "is wasted than verified; that costs draft time, not target time.",
            {
                "verified": rate(f"{_T}_verified_nodes_total{_OF}"),
                "wasted": rate(f"{_T}_wasted_tokens_total{_OF}"),
            },
            TOKENS_PER_S,
        ),
        Panel(
            "Acceptance by depth",
            "Share of the steps that verified a node at a depth which accepted one. Low at depth 1: the draft model "
            "does not fit; a steep fall: proposals are too long.",
            {"depth {{depth}}": ratio(f"{_T}_accepted_tokens_total{_OF}", f"{_T}_proposed_tokens_total{_OF}", "depth")},
            "percentunit",
            alert="SpecdecLowAcceptance",
        ),
        Panel(
            "Verify step",
            "Time of a step that verified proposals. What verification costs is the difference to a plain step of "
            "*Step time*.",
            quantiles(f"{_T}_verify_seconds", _OF),
            "s",
        ),
        Panel(
            "Hold-off",
            "Time that a session's step waited for a draft; most do not wait. Near a step's time: drafts are too slow "
            "or far.",
            quantiles(f"{_T}_hold_off_seconds", _OF),
            "s",
            alert="SpecdecSpeculationNotPaying",
        ),
        Panel(
            "Time to first token",
            "From a session's opening to its first token: waiting for a step, and prefill. Near the coordinators' "
            "own, the target is what is slow.",
            quantiles(f"{_T}_time_to_first_token_seconds", _OF),
            "s",
        ),
    ]


def _drafting() -> list[Panel]:
    return [
        Panel(
            "Time to a proposal",
            "From the arrival of a commit to the first proposal after it; targets wait for it.",
            quantiles(f"{_D}_draft_seconds", _OF),
            "s",
        ),
        Panel(
            "Draft tokens",
            "Per second: computed, and sent.",
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
            "Per second, by kind of their rows.",
            {"{{kind}}": rate(f"{prefix}_steps_total{_OF}", "kind")},
            "ops",
        ),
        Panel(
            "Step time",
            "Mean time of a step, sampling included, by kind. It grows with the batch and the contexts; without them, "
            "something else works on the device or its cores.",
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
            "Held, taking part in steps, and waiting for a first step. Waiting for minutes: KV blocks or "
            "max_batch_seqs are used up.",
            {
                "held {{instance}}": f"{prefix}_sessions{_OF}",
                "running {{instance}}": f"{prefix}_sessions_running{_OF}",
                "waiting {{instance}}": f"{prefix}_queue_length{_OF}",
            },
            alert="SpecdecTargetSaturated",
        ),
        Panel(
            "KV blocks in use",
            "Share in use, and share that is free but caches a prefix, which is given up when needed. In use above "
            "90%: sequences are preempted next.",
            {
                "used {{instance}}": f"{prefix}_kv_blocks_used{_OF} / {prefix}_kv_blocks{_OF}",
                "cached {{instance}}": f"{prefix}_kv_blocks_cached{_OF} / {prefix}_kv_blocks{_OF}",
            },
            "percentunit",
            alert="SpecdecKvPressure",
        ),
        Panel(
            "Preemptions and rollbacks",
            "Sequences whose blocks were taken away, and times a sequence forgot tokens, per second. Preemptions are "
            "work done twice; rollbacks are how speculation works.",
            {
                "preemptions": rate(f"{prefix}_preemptions_total{_OF}"),
                "rollbacks": rate(f"{prefix}_rollbacks_total{_OF}"),
            },
            "ops",
        ),
        Panel(
            "Prefix cache",
            "Share of looked-up tokens that the prefix cache had.",
            {"hits": ratio(f"{prefix}_prefix_cache_hits_total{_OF}", f"{prefix}_prefix_cache_queries_total{_OF}")},
            "percentunit",
            width=12,
        ),
        Panel(
            "Sessions opened",
            "Per second, reopened ones too.",
            {"{{instance}}": rate(f"{prefix}_sessions_opened_total{_OF}", "instance")},
            "ops",
            width=12,
        ),
    ]


def _constraints(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Compiling constraints",
            "Time of compiling a grammar, or of finding out that it does not compile. Sessions wait for it.",
            quantiles(f"{prefix}_grammar_compile_seconds", _OF),
            "s",
            width=12,
        ),
        Panel(
            "Constraints known",
            "Share of the sessions with a constraint whose grammar was known. Low: clients send many different ones.",
            {"hits": ratio(f"{prefix}_grammar_cache_hits_total{_OF}", f"{prefix}_grammar_cache_queries_total{_OF}")},
            "percentunit",
            width=12,
        ),
        Panel(
            "Constraints refused",
            "Sessions per second that were refused or ended for their constraint. invalid and too_complex are the "
            "clients' own; busy: more are asked for than are compiled.",
            {"{{reason}}": rate(f"{prefix}_grammar_refusals_total{_OF}", "reason")},
            "ops",
            width=12,
        ),
    ]


def _device_gap() -> Panel:
    return Panel(
        "Gap between passes",
        "On a GPU's clock: from the end of one pass that decodes to the begin of the next. Tokens are drawn in "
        "it; the rest is idle, or hold-off.",
        quantiles(f"{_T}_device_gap_seconds", _OF),
        "s",
        width=12,
    )


def _masks() -> Panel:
    return Panel(
        "Masks",
        "Mean time of a step's masks, and what of it the step waited for. Equal: they are filled behind the forward "
        "pass, as a GPU's thread and a single core do.",
        {"filling": mean(f"{_T}_mask_seconds", _OF), "waiting": mean(f"{_T}_mask_wait_seconds", _OF)},
        "s",
        width=12,
    )


def _streams(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Open streams",
            "One per coordinator process that is connected.",
            {"{{instance}}": f"{prefix}_open_streams{_OF}"},
        ),
        Panel(
            "Messages",
            "Relayed per second, by direction.",
            {"{{direction}}": rate(f"{prefix}_messages_total{_OF}", "direction")},
            "ops",
        ),
        Panel(
            "Bytes",
            "Relayed per second, by direction.",
            {"{{direction}}": rate(f"{prefix}_message_bytes_total{_OF}", "direction")},
            "Bps",
        ),
        Panel(
            "Engine restarts",
            "Engines that ended, or stood still and were killed, in the last 15 minutes. Streams went on elsewhere.",
            {"{{instance}} {{cause}}": f"increase({prefix}_engine_restarts_total{_OF}[15m])"},
            alert="SpecdecEngineRestarts",
            width=12,
        ),
        Panel(
            "Silence of engines",
            "Time since the last of the signs of life that an engine gives four times a second.",
            {"{{instance}}": f"{prefix}_engine_silence_seconds{_OF}"},
            "s",
            width=12,
        ),
    ]


def _redis(prefix: str) -> list[Panel]:
    return [
        Panel(
            "Redis answers",
            "Whether the last operation that reached it was answered. While it is away the registration expires. "
            "Without Redis always yes.",
            {"{{instance}}": f"{prefix}_store_up{_OF}"},
            words={0: "no", 1: "yes"},
            alert="SpecdecReplicaCannotRegister",
            width=12,
        ),
        Panel(
            "Registrations that failed",
            "Renewals in Redis that failed, per second. Coordinators that use the replica go on.",
            {"{{instance}}": rate(f"{prefix}_announce_failures_total{_OF}", "instance")},
            "ops",
            width=12,
        ),
    ]
