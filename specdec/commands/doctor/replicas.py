"""Checks of the replicas, from the coordinator's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.commands.doctor.findings import Finding, failed, passed, warned
from specdec.config.drafter_options import HEAD_NAMES
from specdec.v1 import coordinator_pb2 as api

_LOOKING_UP = frozenset({"ngram", "suffix", "prediction", "lookahead"})
"""Drafters without weights, which repeat earlier text."""
_HIGH_TEMPERATURE = 0.9
"""Temperature from which sampled text hardly repeats itself."""
_FULL = 0.9
"""Share of KV blocks in use above which there is little room for drafts."""


def check_replicas(info: api.GetModelInfoResponse, status: api.GetStatusResponse) -> Iterator[Finding]:
    """Yield the lines that need no request: states, tokenizers, contexts, versions, memory."""
    targets = [replica for replica in status.replicas if replica.role == "target"]
    drafts = [replica for replica in status.replicas if replica.role == "draft"]
    yield _states(status)
    if not drafts and not info.drafters:
        yield failed(
            "something drafts",
            "no draft, and no drafters in the target",
            "start a draft, or set `drafters` of the targets",
        )
        return
    yield passed("something drafts", ", ".join(info.drafters) or "draft_model")
    if drafts:
        yield _tokenizers(info, drafts)
        yield _contexts(info, drafts)
        yield _memory("KV cache of drafts", drafts)
        yield _links(drafts)
    yield _memory("KV cache of targets", targets)
    yield _pinned("one target", targets)
    if drafts:
        yield _pinned("one draft", drafts)
    yield _numerics(info)


def check_drafters(info: api.GetModelInfoResponse, temperature: float) -> Iterator[Finding]:
    """Yield warnings about drafters that are known not to suit this use."""
    drafters = set(info.drafters)
    if drafters & HEAD_NAMES:
        heads = ", ".join(sorted(drafters & HEAD_NAMES))
        do = "run `specdec doctor --settings FILE --try-heads`: it tries them and their neighbours"
        yield warned(f"{heads}: the layers are those of its training", "not known from here", do)
    if "lookahead" in drafters and info.target.device.startswith("cpu"):
        do = "remove lookahead: it is for large GPUs with one session"
        yield warned("rows are cheap enough for lookahead", "the target computes on a CPU", do)
    if drafters and drafters <= _LOOKING_UP and temperature >= _HIGH_TEMPERATURE:
        measured = f"{', '.join(sorted(drafters))} at temperature {temperature:g}"
        do = "add a draft model or a head: sampled text hardly repeats earlier text"
        yield warned("drafters suit the temperature", measured, do)


def _states(status: api.GetStatusResponse) -> Finding:
    bad = [f"{one.role} {one.address} {one.state}" for one in status.replicas if one.state != "ready"]
    if bad or status.degraded:
        measured = "; ".join([*bad, *status.degraded])
        return failed("replicas are ready", measured, "see `specdec models`, and the logs of these replicas")
    return passed("replicas are ready", f"{len(status.replicas)} replicas")


def _tokenizers(info: api.GetModelInfoResponse, drafts: Sequence[api.ReplicaStatus]) -> Finding:
    what, wanted = "tokenizers are equal by content", info.target.tokenizer_digest
    translating = [one.identity.draft_vocabulary for one in drafts if one.identity.HasField("draft_vocabulary")]
    others = [one.address for one in drafts if one.identity.tokenizer_digest not in ("", wanted)]
    if others:
        return failed(what, f"{', '.join(others)} has another one", "set `target` of the draft: then it translates")
    if not wanted:
        return warned(what, "the target has none to compare", "check that both models use the same token ids")
    if translating:
        least = min(translating, key=lambda one: one.num_shared)
        shared = f"the draft has {least.num_shared} of {least.num_target} tokens"
        do = "use a draft with the target's tokenizer if the acceptance below does not pay"
        return warned(what, f"{len(translating)} of {len(drafts)} drafts translate ({least.method}): {shared}", do)
    return passed(what, f"{wanted[:12]}, {info.target.vocab_size} tokens")


def _contexts(info: api.GetModelInfoResponse, drafts: Sequence[api.ReplicaStatus]) -> Finding:
    what = "the draft's context is as long as the target's"
    longest, own = info.target.max_model_len, min(one.identity.max_model_len for one in drafts)
    if 0 < own < longest:
        measured = f"draft {own}, target {longest} tokens: longer sequences end without drafts"
        return warned(what, measured, f"set the target's max_model_len to {own}, or use a draft with a longer context")
    return passed(what, f"{own} and {longest} tokens")


def _links(drafts: Sequence[api.ReplicaStatus]) -> Finding:
    what = "drafts and targets talk directly"
    pairs = [(draft.address, link) for draft in drafts for link in draft.links]
    relayed = [f"{draft} and {link.target}: {link.reason}" for draft, link in pairs if not link.is_direct]
    if relayed:
        do = "set `link_targets` of the draft to the targets' addresses, and let it reach and call them; or relay on"
        return warned(what, "; ".join(relayed), do)
    if not pairs:
        do = "run the command again after some requests; else see `proposal_path`, and the versions of both"
        return warned(what, "no draft has reported a link", do)
    return passed(what, ", ".join(f"{draft} and {link.target}" for draft, link in pairs))


def _memory(what: str, replicas: Sequence[api.ReplicaStatus]) -> Finding:
    shares = [one.load.kv_blocks_used / one.load.kv_blocks_total for one in replicas if one.load.kv_blocks_total]
    if not shares:
        return warned(what, "no load was reported yet", "run the command again after some requests")
    measured = f"{max(shares):.0%} in use at the fullest replica"
    if max(shares) > _FULL:
        return warned(what, measured, "set more blocks (num_blocks), allow fewer sessions, or add replicas")
    return passed(what, measured)


def _pinned(what: str, replicas: Sequence[api.ReplicaStatus]) -> Finding:
    what = f"{what} checkpoint and numerics"
    kinds = {(one.identity.weights_digest, one.identity.numerics_id) for one in replicas if one.HasField("identity")}
    names = sorted({f"{one.identity.name}@{one.identity.revision or 'no revision'}" for one in replicas})
    if len(kinds) > 1:
        do = "pin revision and dtype for all replicas of a role: acceptance and targets' near-ties depend on them"
        return warned(what, f"{len(kinds)} kinds: {', '.join(names)}", do)
    digest = next(iter(kinds), ("", ""))[0]
    return passed(what, f"{', '.join(names)}, weights {digest[:12]}")


def _numerics(info: api.GetModelInfoResponse) -> Finding:
    what = "output is the same to the last token"
    if not info.target.row_invariant:
        do = "nothing if near-ties may differ; else use float32 on CPUs, or `deterministic` on GPUs"
        return warned(what, f"{info.target.numerics_id} is not row-invariant: equal up to near-ties", do)
    return passed(what, "row-invariant")
