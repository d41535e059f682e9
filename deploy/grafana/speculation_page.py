"""The page on speculation: is it paying, for whom, where is it lost."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import OF_NAMESPACE, TIMES, TOKENS_PER_S, mean, quantiles, rate, ratio

_C = "specdec_coordinator"
_T = "specdec_target"
_D = "specdec_draft"
_OF = OF_NAMESPACE
_HITS = f"{_T}_hits_total{_OF}"


def speculation() -> dict[str, Any]:
    """Return the dashboard."""
    return dashboard(
        "specdec-speculation",
        "specdec / Speculation",
        "Is speculation paying, for whom, and where is it lost?",
        [
            Row("Is it paying?", _paying()),
            Row("For whom?", _for_whom()),
            Row("Which drafter?", _by_drafter()),
            Row("Where is it lost?", _lost()),
        ],
    )


def _paying() -> list[Panel]:
    return [
        Panel(
            "Speed-up",
            "Time of plain decoding for the same tokens over the time taken, for all targets. Below 1 speculation "
            "costs more than it gains.",
            {
                "speed-up": ratio(
                    f"{_T}_plain_equivalent_seconds_total{_OF}",
                    f"{_T}_decode_seconds_total{_OF}",
                )
            },
            TIMES,
            "stat",
            6,
            ((None, "red"), (1, "green")),
            "SpecdecSpeculationNotPaying",
        ),
        Panel(
            "Acceptance",
            "Accepted share of verified draft tokens in the last 5 minutes, in the worst namespace. Below 30% the "
            "draft hardly helps.",
            {"acceptance": f"min(specdec:acceptance:ratio_rate5m{_OF})"},
            "percentunit",
            "stat",
            6,
            ((None, "red"), (0.3, "orange"), (0.6, "green")),
            "SpecdecLowAcceptance",
        ),
        Panel(
            "Tokens per verified step",
            "Mean number of tokens that a step with a proposal committed; plain decoding commits 1.",
            {"tokens": mean(f"{_T}_committed_tokens", _OF)},
            "short",
            "stat",
            6,
        ),
        Panel(
            "Proposal at hand",
            "Share of sessions' steps that had a usable proposal when they were formed. If it is low, drafts are too "
            "slow, too few or too far; see *Draft latency*.",
            {"hits": f"{rate(_HITS)} / ({rate(_HITS)} + {rate(f'{_T}_misses_total{_OF}')})"},
            "percentunit",
            "stat",
            6,
        ),
        Panel(
            "Tokens by origin",
            "Output tokens per second. Draft tokens cost no step of their own; decode tokens are plain decoding.",
            {"{{origin}}": rate(f"{_C}_tokens_total{_OF}", "origin")},
            TOKENS_PER_S,
            width=12,
        ),
        Panel(
            "Steps by kind",
            "Verdicts per second: verify had a proposal, plain had none, prefill is a first token.",
            {"{{kind}}": rate(f"{_C}_steps_total{_OF}", "kind")},
            "ops",
            width=12,
        ),
    ]


def _for_whom() -> list[Panel]:
    return [
        Panel(
            "Speed-up by target",
            "Speed-up of each target. Targets differ in load: a full batch leaves less room for verification.",
            {"{{instance}}": f"specdec:speedup:ratio_rate5m{_OF}"},
            TIMES,
            steps=((None, "red"), (1, "transparent")),
            alert="SpecdecSpeculationNotPaying",
        ),
        Panel(
            "Acceptance by target",
            "Acceptance of each target. It differs with the prompts; if one target is low, its model may be wrong. "
            "Below the line the draft hardly helps.",
            {"{{instance}}": ratio(f"{_T}_accepted_tokens_total{_OF}", f"{_T}_proposed_tokens_total{_OF}", "instance")},
            "percentunit",
            steps=((None, "red"), (0.3, "transparent")),
            alert="SpecdecLowAcceptance",
        ),
        Panel(
            "Draft credit by target",
            "Draft tokens per session that pay at the target's load; 0 turns speculation off.",
            {"{{instance}}": f"{_T}_draft_credit{_OF}"},
        ),
    ]


def _by_drafter() -> list[Panel]:
    proposed, verified, accepted, seconds = (
        f"{_T}_drafter_{what}_total{_OF}"
        for what in ("proposed_tokens", "verified_tokens", "accepted_tokens", "seconds")
    )
    return [
        Panel(
            "Proposed by drafter",
            "Tokens per second that drafts (`draft_model`) and drafters propose. A drafter that does not pay is asked "
            "less.",
            {"{{drafter}}": rate(proposed, "drafter")},
            TOKENS_PER_S,
        ),
        Panel(
            "Verified by drafter",
            "Proposed tokens per second that a step verified. A token that several drafters proposed counts for each.",
            {"{{drafter}}": rate(verified, "drafter")},
            TOKENS_PER_S,
        ),
        Panel(
            "Accepted by drafter",
            "Proposed tokens per second that the target accepted.",
            {"{{drafter}}": rate(accepted, "drafter")},
            TOKENS_PER_S,
        ),
        Panel(
            "Acceptance by drafter",
            "Accepted share of a drafter's verified tokens.",
            {"{{drafter}}": ratio(accepted, verified, "drafter")},
            "percentunit",
        ),
        Panel(
            "Tokens gained per millisecond by drafter",
            "Accepted tokens per millisecond of a drafter, without the rows that verify them. A drafter in the target "
            "cannot pay below the tokens per millisecond of a plain step. Draft services work beside the target, and "
            "report their time themselves.",
            {"{{drafter}}": f"{rate(accepted, 'drafter')} / (1000 * {rate(seconds, 'drafter')})"},
            "short",
        ),
        Panel(
            "Accepted by drafter and depth",
            "Accepted tokens per second by their distance from the last committed token.",
            {"{{drafter}}, depth {{depth}}": rate(accepted, "drafter, depth")},
            TOKENS_PER_S,
        ),
    ]


def _lost() -> list[Panel]:
    return [
        Panel(
            "Acceptance by depth",
            "Share of verified draft tokens accepted at each depth; a steep fall means a poor draft.",
            {"depth {{depth}}": ratio(f"{_C}_accepted_tokens_total{_OF}", f"{_C}_proposed_tokens_total{_OF}", "depth")},
            "percentunit",
        ),
        Panel(
            "Wasted and stale",
            "Per second: draft tokens that verdicts discarded, draft tokens that reached targets too late, and commits "
            "that drafts knew already. Drafts work ahead on many outcomes, so most tokens are wasted; if nearly as "
            "many are stale, drafts are too slow or too far.",
            {
                "wasted tokens": rate(f"{_C}_wasted_tokens_total{_OF}"),
                "stale at targets": rate(f"{_T}_stale_proposals_total{_OF}"),
                "stale at drafts": rate(f"{_D}_stale_proposals_total{_OF}"),
            },
            "cps",
        ),
        Panel(
            "Sessions that lost their draft",
            "Sessions per second, by cause; they continue by plain decoding. stream_broken: restarts or the network; "
            "draining: planned; others: drafts that are full or faulty.",
            {"{{cause}}": rate(f"{_C}_draft_fallbacks_total{_OF}", "cause")},
            "ops",
            alert="SpecdecDraftFallbacks",
        ),
        Panel(
            "Hedges",
            "Per second: choices that were opened at a second draft because their own was slow, and those that the "
            "second draft kept. Many won hedges mean a slow draft; many others mean load.",
            {
                "begun": rate(f"{_C}_draft_hedges_total{_OF}"),
                "won": rate(f"{_C}_draft_hedges_won_total{_OF}"),
            },
            "ops",
        ),
        Panel(
            "Draft latency",
            "Time at the coordinator from a commit to the first proposal after it. The difference from *Time to a "
            "proposal* (Drafts page) is network and coordinator.",
            quantiles(f"{_C}_draft_latency_seconds", _OF),
            "s",
        ),
        Panel(
            "Verify latency",
            "Time at the coordinator from relaying a proposal to the verdict that used it.",
            quantiles(f"{_C}_verify_latency_seconds", _OF),
            "s",
        ),
        Panel(
            "Hold-off",
            "Time that target steps waited for a draft; more than a step's time means that drafts are too slow.",
            quantiles(f"{_T}_hold_off_seconds", _OF),
            "s",
        ),
        Panel(
            "Committed tokens that the draft had",
            "Share of committed tokens that the draft had computed before; the others cost it another pass.",
            {
                "found": ratio(
                    f'{_D}_committed_tokens_total{{found="found",{_OF[1:]}', f"{_D}_committed_tokens_total{_OF}"
                )
            },
            "percentunit",
        ),
        Panel(
            "Draft work that is sent",
            "Share of computed draft tokens that were sent.",
            {"sent": ratio(f"{_D}_tokens_total{_OF}", f"{_D}_drafted_tokens_total{_OF}")},
            "percentunit",
        ),
        Panel(
            "Time outside the models",
            "Part of a request's decoding time in which no step ran and none waited for a draft.",
            quantiles(f"{_C}_outside_seconds", _OF),
            "s",
        ),
    ]
