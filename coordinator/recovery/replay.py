"""Replay the known tokens of an interrupted request before its sessions open for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.coordinator.finishing import Finisher
from specdec.coordinator.intake.resume import HeldChoice
from specdec.coordinator.sessions.session import Session
from specdec.coordinator.text.choice_output import EndRules
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest


def replay(finisher: Finisher, session: Session, held: HeldChoice, max_model_len: int) -> bool:
    """Pass held tokens through detokenizer and stop check, and stream what the client lacks.

    Returns:
        Whether the choice has ended with these tokens.

    Raises:
        InvalidRequest: tokens follow the choice's end, or the client claims more text than its tokens make.
    """
    if not held.token_ids:
        return False
    path = f"resume.choices[{session.choice}]"
    max_tokens = min(session.sampling.max_tokens, max_model_len - session.num_prompt_tokens)
    ends = set(session.sampling.stop_token_ids)
    if not session.sampling.ignore_eos:
        ends.update(session.request.model.eos_token_ids)
    rules = EndRules(frozenset(ends), session.sampling.min_tokens, max_tokens)
    step = session.output.replay(held.token_ids, rules)
    if step.num_kept < held.num_at_client:
        raise InvalidRequest(f"{path}.token_ids", f"the choice ends after token {step.num_kept}: send no more")
    text = step.text.encode()
    if held.text_offset_bytes > len(text):
        raise InvalidRequest(f"{path}.text_offset_bytes", f"the tokens make only {len(text)} bytes of text")
    session.token_ids.extend(held.token_ids[: step.num_kept])
    session.num_written += held.num_at_client
    new = slice(held.num_at_client, step.num_kept)
    token_ids = held.token_ids[new]
    rest = text[held.text_offset_bytes :].decode("utf-8", "ignore")
    if rest or token_ids:
        origins = _origins(held.origins[new])
        session.request.stream.output(session.choice, rest, session.detokenizers, token_ids, origins)
    if step.finish is not None:
        finisher.finish(session, step.finish)
    return step.finish is not None


def _origins(values: Sequence[int]) -> list[pb.Origin.ValueType]:
    return [pb.Origin.ValueType(value) for value in values]
