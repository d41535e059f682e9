"""Replay the known tokens of an interrupted request before its sessions open for the rest."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from specdec.coordinator.finishing import Finisher
from specdec.coordinator.intake.resume import HeldChoice
from specdec.coordinator.sessions.session import Session
from specdec.coordinator.tasks import pieces
from specdec.coordinator.text.choice_output import ChoiceOutput, EndRules
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest

_AT_ONCE = 4096
"""Tokens that are detokenized in one turn of the event loop, which takes some ten milliseconds."""


def replay(finisher: Finisher, session: Session, held: HeldChoice, max_model_len: int) -> Generator[None, None, bool]:
    """Pass held tokens through detokenizer and stop check, and stream what the client lacks; for `in_turns`.

    Returns:
        Whether the choice has ended: with these tokens, or meanwhile by its client.

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
    output, session.output = session.output, ChoiceOutput(session.detokenizers.create(True))  # nothing to abort yet
    num_kept, texts, finish = 0, list[str](), None
    for piece in pieces(held.token_ids, _AT_ONCE):
        if num_kept:
            yield
        step = output.replay(piece, rules)
        num_kept, finish = num_kept + step.num_kept, step.finish
        texts.append(step.text)
        if finish is not None:
            break
    if session.finish is not None:
        return True
    session.output = output
    if num_kept < held.num_at_client:
        raise InvalidRequest(f"{path}.token_ids", f"the choice ends after token {num_kept}: send no more")
    text = "".join(texts).encode()
    if held.text_offset_bytes > len(text):
        raise InvalidRequest(f"{path}.text_offset_bytes", f"the tokens make only {len(text)} bytes of text")
    session.token_ids.extend(held.token_ids[:num_kept])
    session.num_written += held.num_at_client
    new = slice(held.num_at_client, num_kept)
    token_ids, origins = held.token_ids[new], cast(list[pb.Origin.ValueType], held.origins[new])
    rest = text[held.text_offset_bytes :].decode("utf-8", "ignore")
    if rest or token_ids:
        session.request.stream.output(session.choice, rest, session.detokenizers, token_ids, origins)
    if finish is not None:
        finisher.finish(session, finish)
    return session.finish is not None
