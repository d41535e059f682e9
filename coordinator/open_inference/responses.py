"""From the chunks of a Generate call to ModelInferResponses."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.coordinator.open_inference.requests import OUTPUTS, VERSION, InferCall
from specdec.coordinator.open_inference.tensors import add_output
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip

FINAL = "triton_final_response"
"""Parameter of a response: whether it is its request's last one."""
_REASONS = {
    pb.FINISH_REASON_STOP: b"stop",
    pb.FINISH_REASON_LENGTH: b"length",
    pb.FINISH_REASON_ABORT: b"abort",
}


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Since the last response, as at Triton's vLLM backend."""
    finish_reason: bytes = b""


class InferResponses:
    """The responses of one call."""

    def __init__(self, call: InferCall, request_id: str) -> None:
        self._call = call
        self._request_id = request_id
        self._model = ""
        self._num_prompt_tokens = 0
        self._choices: dict[int, _Choice] = {}

    def cost(self, chunk: api.GenerateResponse) -> int:
        """Bytes that a chunk adds to a whole answer: its own, and at the beginning the prompt in each choice's text."""
        if chunk.WhichOneof("chunk") == "started" and self._call.echoes_prompt:
            return len(self._call.generate.prompt.encode()) * max(1, self._call.generate.sampling.n)
        return chunk.ByteSize()

    def take(self, chunk: api.GenerateResponse) -> oip.ModelInferResponse | None:
        """Add a chunk; returns the response that is due: one for each delta of a streamed call, and the last one."""
        kind = chunk.WhichOneof("chunk")
        if kind == "started":
            self._model = chunk.started.model.name
            self._num_prompt_tokens = chunk.started.num_prompt_tokens
        elif kind == "delta":
            choice = self._choices.setdefault(chunk.delta.index, _Choice())
            choice.texts.append(chunk.delta.text)
            if "output_ids" in self._call.outputs:
                choice.token_ids.extend(token.id for token in chunk.delta.tokens)
            choice.num_tokens += len(chunk.delta.tokens)
            if self._call.is_streamed and chunk.delta.text:
                return self._response(is_final=False)
        elif kind == "choice_finished":
            choice = self._choices.setdefault(chunk.choice_finished.index, _Choice())
            choice.finish_reason = _REASONS.get(chunk.choice_finished.reason, b"")
        elif kind == "finished":
            return self._response(is_final=True)
        return None

    def _response(self, *, is_final: bool) -> oip.ModelInferResponse:
        """All outputs that have come since the last response."""
        response = oip.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._request_id)
        response.parameters[FINAL].bool_param = is_final
        echoed = self._call.generate.prompt if self._call.echoes_prompt else ""
        choices = [choice for _, choice in sorted(self._choices.items())]
        for name in self._call.outputs:
            match name:
                case "text_output":
                    values: list[bytes] | list[int] = [(echoed + "".join(each.texts)).encode() for each in choices]
                case "finish_reason":
                    values = [each.finish_reason for each in choices]
                case "num_output_tokens":
                    values = [each.num_tokens for each in choices]
                case "num_input_tokens":
                    values = [self._num_prompt_tokens]
                case _:
                    values = [token for each in choices for token in each.token_ids]
            add_output(response, name, OUTPUTS[name], values)
        for choice in choices:
            choice.texts.clear()
            choice.token_ids.clear()
            choice.num_tokens = 0
        return response
