"""Tables that `specdec generate` and `specdec models` print."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.table import Table
from rich.text import Text

from specdec.client import Completion
from specdec.commands.views.origins import ORIGIN_NAMES, ORIGIN_STYLES
from specdec.v1 import common_pb2, coordinator_pb2

_KEPT = "\n\t"
_PICTURES = 0x2400
"""Unicode has a picture of each control character below a space, in their order, from here on."""
_DELETE, _DELETE_PICTURE = 0x7F, 0x2421
_HARMLESS = {code: chr(_PICTURES + code) for code in range(0x20) if chr(code) not in _KEPT}
_HARMLESS |= {_DELETE: chr(_DELETE_PICTURE), **dict.fromkeys(range(128, 160), "�")}
_MODES = {value: name.removeprefix("VERIFY_MODE_").lower() for name, value in common_pb2.VerifyMode.items()}


def harmless(text: str) -> str:
    """The text with pictures in place of control characters; lines and tabs stay."""
    return text.translate(_HARMLESS)


def cell(text: str, style: str = "") -> Text:
    """The text, for a table or a line."""
    return Text(harmless(text), style=style)


def make_pairs(title: str) -> Table:
    """Return an empty table of names and values."""
    table = make_table(title, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    return table


def make_table(title: str, *columns: str) -> Table:
    """Return an empty table in the common style: first column left-aligned, others right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def statistics_table(completion: Completion) -> Table:
    """Return the statistics of a finished request: tokens, origins, acceptance, times."""
    finished = completion.require_finished()
    stats, usage = finished.stats, finished.usage
    table = make_pairs("Statistics")
    table.add_row("prompt tokens", f"{usage.prompt_tokens} ({usage.cached_tokens} from the prefix cache)")
    table.add_row("output tokens", str(usage.completion_tokens))
    table.add_row("  by origin", origin_counts(completion))
    table.add_row("time to first token", _milliseconds(completion.first_token_s))
    table.add_row("decoding speed", _speed(completion.tokens_per_second))
    table.add_section()
    table.add_row("target steps", f"{stats.num_steps} ({stats.num_verify_steps} verified a proposal)")
    if stats.num_verify_steps:
        share = f" ({stats.num_accepted / stats.num_proposed:.0%})" if stats.num_proposed else ""
        table.add_row("draft accepted", f"{stats.num_accepted} of {stats.num_proposed} verified{share}")
        table.add_row("  by depth", acceptance_by_depth(stats))
        table.add_row("acceptance length", f"{stats.mean_acceptance_length:.2f} tokens per verifying step, on average")
        table.add_row("steps with a proposal", f"{stats.hit_rate:.0%}")
        table.add_row("draft wasted", str(stats.num_wasted))
    for record in stats.drafters:
        table.add_row(
            cell(f"  {record.name}"),
            f"{record.num_accepted} of {record.num_verified} verified, {record.num_proposed} offered, "
            f"{record.cost_ms:.1f} ms",
        )
    if usage.HasField("accepted_prediction_tokens"):
        taken, refused = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        table.add_row("prediction", f"{taken} tokens accepted, {refused} rejected")
    if stats.num_suspended_steps:
        table.add_row("draft suspended", f"{stats.num_suspended_steps} steps: plain decoding was measured to be faster")
    table.add_section()
    table.add_row("queued", f"{stats.queue_ms:.1f} ms")
    table.add_row("prefill", f"{stats.prefill_ms:.1f} ms")
    table.add_row("target steps", f"{stats.verify_ms:.1f} ms")
    table.add_row("drafting (overlaps)", f"{stats.draft_ms:.1f} ms")
    table.add_row("waiting for a draft", f"{stats.hold_off_ms:.1f} ms")
    table.add_row("outside any step", f"{stats.outside_ms:.1f} ms")
    return table


def origin_counts(completion: Completion) -> Text:
    """Return the number of tokens by origin, in the origins' colours."""
    counts = Counter(token.origin for choice in completion.choices.values() for token in choice.tokens)
    parts = [
        Text(f"{name} {counts[origin]}", style=ORIGIN_STYLES[origin])
        for origin, name in ORIGIN_NAMES.items()
        if counts[origin]
    ]
    named = Counter(token.drafter for choice in completion.choices.values() for token in choice.tokens if token.drafter)
    parts += [cell(f"({name} {count})") for name, count in sorted(named.items())]
    return Text("  ").join(parts)


def acceptance_by_depth(stats: coordinator_pb2.SpeculationStats) -> str:
    """Return the accepted share of the steps that verified a node at depth 1, 2, ..."""
    pairs = zip(stats.accepted_by_depth, stats.verified_by_depth, strict=False)
    return "  ".join(f"{accepted / verified:.2f}" for accepted, verified in pairs if verified)


def comparison_table(speculative: Completion, plain: Completion) -> Table:
    """Return the speeds of the same request with and without speculation, side by side."""
    table = make_table("The same request", "", "with speculation", "without", "ratio")
    fast, slow = speculative.tokens_per_second, plain.tokens_per_second
    ratio = f"{fast / slow:.2f}x" if fast and slow else "-"
    table.add_row("decoding speed", _speed(fast), _speed(slow), Text(ratio, style="bold"))
    first = _milliseconds(speculative.first_token_s), _milliseconds(plain.first_token_s)
    table.add_row("time to first token", *first, "")
    cached = [f"{run.require_finished().usage.cached_tokens}" for run in (speculative, plain)]
    table.add_row("  prompt tokens cached", *cached, "")
    steps = speculative.require_finished().stats.num_steps, plain.require_finished().stats.num_steps
    table.add_row("target steps", *map(str, steps), f"{steps[0] / steps[1]:.2f}x" if steps[1] else "-")
    table.add_row("output tokens", str(speculative.num_tokens), str(plain.num_tokens), "")
    return table


def equality_line(speculative: Completion, plain: Completion) -> Text:
    """Return whether both runs gave the same tokens, and if not, where they begin to differ."""
    if speculative.identity == plain.identity:
        return Text(f"All {plain.num_tokens} tokens are equal.", style="bold green")
    for index in sorted(speculative.choices | plain.choices):
        ours = speculative.choices[index].token_ids if index in speculative.choices else []
        theirs = plain.choices[index].token_ids if index in plain.choices else []
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            return Text(f"The tokens differ: choice {index} from output token {at} on.", style="bold red")
    return Text("The tokens are equal, the text is not.", style="bold red")


def replicas_table(status: coordinator_pb2.GetStatusResponse) -> Table:
    """Return each replica with its model, state and load."""
    table = make_table("Replicas", "role", "address", "state", "model", "place", "run+wait", "KV blocks")
    for column in table.columns[:3]:
        column.no_wrap, column.justify = True, "left"
    for replica in status.replicas:
        identity, load = replica.identity, replica.load
        table.add_row(
            cell(replica.role),
            cell(replica.address),
            cell(replica.state, style="green" if replica.state == "ready" else "yellow"),
            cell(f"{identity.name} ({parameters(identity)})" if identity.name else "-"),
            cell(f"{identity.dtype} on {identity.device}" if identity.name else "-"),
            f"{load.num_running}+{load.num_waiting}",
            f"{load.kv_blocks_used}/{load.kv_blocks_total}",
        )
    if not status.replicas:
        table.caption = "No target and no draft is known."
        table.caption_style = "yellow"
    return table


def coordinators_table(status: coordinator_pb2.GetStatusResponse) -> Table:
    """Return all coordinators that share a registry, as they announced themselves."""
    table = make_table("Coordinators", "address", "state", "run+wait")
    for column in table.columns[:2]:
        column.no_wrap, column.justify = True, "left"
    for one in status.coordinators:
        state = cell(one.state, style="green" if one.state == "ready" else "yellow")
        table.add_row(cell(one.address), state, f"{one.load.num_running}+{one.load.num_waiting}")
    return table


def replica_details(status: coordinator_pb2.GetStatusResponse) -> Text:
    """Return the reason for each replica's state, one line for each that reports one."""
    lines = [f"{replica.address}: {replica.detail}" for replica in status.replicas if replica.detail]
    return cell("\n".join(lines), style="yellow")


def model_table(info: coordinator_pb2.GetModelInfoResponse) -> Table:
    """Return the served model and its limits."""
    table = make_pairs("Served")
    target = f"{info.target.name} ({info.target.architecture}, {parameters(info.target)} parameters)"
    table.add_row("model", cell(target))
    if info.HasField("draft"):
        draft = f"{info.draft.name} ({parameters(info.draft)} parameters)"
    else:
        draft = "none: the target's own drafters propose" if info.drafters else "none: decoding is plain"
    table.add_row("draft", cell(draft))
    if info.draft.HasField("draft_vocabulary"):
        table.add_row("  its tokenizer", cell(vocabulary(info.draft.draft_vocabulary)))
    if info.drafters:
        table.add_row("drafters", cell(", ".join(info.drafters)))
    table.add_row("verification", _MODES.get(info.default_verify_mode, str(info.default_verify_mode)))
    numerics = f"{info.target.numerics_id}{' (row-invariant)' if info.target.row_invariant else ''}"
    table.add_row("numerics", cell(numerics))
    table.add_row("context", f"{info.max_model_len} tokens")
    table.add_row("limits", f"{info.max_tokens_limit} output tokens, {info.max_choices} choices")
    if defaults := info.target.sampling_defaults.ListFields():
        told = ", ".join(f"{field.name} {value:g}" for field, value in defaults)
        table.add_row("defaults", cell(f"{told}: for requests that name none"))
    table.add_row("chat template", "yes" if info.has_chat_template else "no")
    return table


def vocabulary(shared: common_pb2.DraftVocabulary) -> str:
    """Return how a draft with another tokenizer drafts, and how many of the target's tokens it has."""
    share = f" ({shared.num_shared / shared.num_target:.0%})" if shared.num_target else ""
    how = {"intersection": "drafts those tokens", "text": "drafts text"}.get(shared.method, shared.method)
    return f"differs from the target's: has {shared.num_shared} of {shared.num_target} tokens{share}, {how}"


def parameters(identity: common_pb2.ModelIdentity) -> str:
    """Return the number of parameters, rounded: 91.2M, 1.5B."""
    number = float(identity.num_parameters)
    for unit in ("", "K", "M", "B"):
        if number < 1000 or unit == "B":
            return f"{number:.1f}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    raise AssertionError("unreachable")
