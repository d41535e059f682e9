"""A coordinator without a model that says what a test makes of each conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from specdec.v1 import common_pb2, coordinator_pb2
from tests.support.services.fake_coordinator import TARGET, FakeCoordinator

_PIECE_CHARS = 7


class TalkingCoordinator(FakeCoordinator):
    """Records requests, and says `say` of each in small pieces, each one token."""

    def __init__(self, say: Callable[[coordinator_pb2.GenerateRequest], str]) -> None:
        super().__init__()
        self.say = say
        self.breaks_after: int | None = None
        """Pieces after which each answer ends in an error."""

    def _answer(self, request: coordinator_pb2.GenerateRequest) -> Iterator[coordinator_pb2.GenerateResponse]:
        started = coordinator_pb2.GenerateStarted(request_id="r", model=TARGET, num_prompt_tokens=5)
        started.is_constrained = request.sampling.HasField("constraint")
        started.is_thinking = False
        yield coordinator_pb2.GenerateResponse(started=started)
        text = self.say(request)
        pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
        most = request.sampling.max_tokens or len(pieces)
        for number, piece in enumerate(pieces[:most]):
            token = coordinator_pb2.OutputToken(id=number, text=piece)
            if number == self.breaks_after:
                raise RuntimeError("the coordinator has broken off")
            yield coordinator_pb2.GenerateResponse(delta=coordinator_pb2.ChoiceDelta(text=piece, tokens=[token]))
        is_cut = most < len(pieces)
        reason = common_pb2.FINISH_REASON_LENGTH if is_cut else common_pb2.FINISH_REASON_STOP
        yield coordinator_pb2.GenerateResponse(choice_finished=coordinator_pb2.ChoiceFinished(reason=reason))
        usage = coordinator_pb2.Usage(prompt_tokens=5, completion_tokens=min(most, len(pieces)))
        yield coordinator_pb2.GenerateResponse(finished=coordinator_pb2.GenerateFinished(usage=usage))


def calls(*named: tuple[str, dict[str, Any]]) -> str:
    """Calls in the form of hermes."""
    return "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in named)


def last_results(request: coordinator_pb2.GenerateRequest) -> list[str]:
    """Results of tools since the user's last message."""
    results: list[str] = []
    for message in reversed(request.messages.messages):
        if message.role == "user":
            break
        if message.role == "tool":
            results.insert(0, message.content)
    return results
