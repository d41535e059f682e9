"""Tokenize and Detokenize: text to tokens and back without generation, fair to tenants and bounded as requests are.

These calls use no tokens of a quota, but a coordinator's time and memory. So the bytes of a call, or of its answer if
that is longer, count against the budgets of bytes until the answer has left. Long inputs are converted, and their
answers encoded, in a thread when their tenant's turn comes, as long prompts are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from specdec.coordinator.intake.prompt import PromptReader
from specdec.coordinator.intake.text_limits import TokenizingTurns
from specdec.coordinator.intake.validation import Limits, check_vocabulary
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.tasks import let_others_run
from specdec.service.byte_budget import ByteBudget
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

_INLINE_TOKENS = 1024
"""Tokens converted in the event loop, which takes two milliseconds; more would hold up the other streams."""

_LEAST_TOKEN_BYTES = 3
"""Bytes of one token in the answer to Tokenize: its id, and the tag and length of its text."""


class Conversions:
    """Answers Tokenize and Detokenize with encoded responses."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        turns: TokenizingTurns,
        prompt_bytes: ByteBudget,
        max_message_bytes: int,
    ) -> None:
        """Convert nothing yet.

        Args:
            fleet: knows the served model.
            limits_of: returns what clients may ask of a model.
            turns: where long inputs are converted.
            prompt_bytes: budgets that calls count against.
            max_message_bytes: size limit of an answer.
        """
        self._max_message_bytes = max_message_bytes
        self._fleet = fleet
        self._limits_of = limits_of
        self._turns = turns
        self._prompt_bytes = prompt_bytes

    async def tokenize(self, request: api.TokenizeRequest, tenant: str, weight: float, held: ExitStack) -> bytes:
        """An encoded TokenizeResponse. Closing `held` gives back the call's bytes.

        Raises:
            InvalidRequest: the text is empty or too long, or the answer too large.
            Overloaded: the bytes of the tenant, or of all, are used up (PROMPT_BYTES_EXCEEDED).
        """
        num_bytes = request.ByteSize()
        held.enter_context(self._prompt_bytes.hold(tenant, num_bytes))
        served = self._fleet.require_served(request.model)
        reader = PromptReader(served.tokenizer, self._limits_of(served.identity), self._turns, tenant, weight)
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        texts = served.tokenizer.detokenizers
        field = str(request.WhichOneof("input"))

        def answer(token_ids: list[int]) -> bytes:
            self._check_size(field, len(token_ids) * _LEAST_TOKEN_BYTES)
            tokens = [texts.token_text(token_id) for token_id in token_ids]
            return api.TokenizeResponse(token_ids=token_ids, tokens=tokens).SerializeToString()

        match request.WhichOneof("input"):
            case "text" if not request.text:
                encoded = b""
            case "text":
                encoded = await reader.convert("text", request.text, add_special is not False, answer)
            case "messages":
                encoded = await reader.convert_chat(request.messages, bool(add_special), answer)
            case _:
                raise InvalidRequest("input", "one of text and messages is required")
        return self._held(field, encoded, num_bytes, tenant, held)

    async def detokenize(self, request: api.DetokenizeRequest, tenant: str, weight: float, held: ExitStack) -> bytes:
        """An encoded DetokenizeResponse; `held` and errors as in `tokenize`."""
        num_bytes = request.ByteSize()
        held.enter_context(self._prompt_bytes.hold(tenant, num_bytes))
        served = self._fleet.require_served(request.model)
        limits = self._limits_of(served.identity)
        check_num_ids(len(request.token_ids), limits)
        token_ids = request.token_ids[:]  # as a list
        await let_others_run(len(token_ids))
        check_vocabulary("token_ids", token_ids, limits)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def answer() -> bytes:
            text = served.tokenizer.decode(token_ids, skip, is_prompt=request.is_prompt)
            if not request.with_tokens:
                return api.DetokenizeResponse(text=text).SerializeToString()
            texts = served.tokenizer.detokenizers
            special = {token_id for token_id in token_ids if token_id in texts.special_texts}
            tokens = map(texts.token_bytes, token_ids)
            return api.DetokenizeResponse(text=text, tokens=tokens, special_token_ids=special).SerializeToString()

        is_long = len(token_ids) > _INLINE_TOKENS
        encoded = await self._turns.run_in_turn(answer, num_bytes, tenant, weight) if is_long else answer()
        return self._held("token_ids", encoded, num_bytes, tenant, held)

    def _held(self, field: str, encoded: bytes, num_bytes: int, tenant: str, held: ExitStack) -> bytes:
        """The answer; the bytes that it has more than its request are held, too."""
        self._check_size(field, len(encoded))
        if len(encoded) > num_bytes:
            held.enter_context(self._prompt_bytes.hold(tenant, len(encoded) - num_bytes))
        return encoded

    def _check_size(self, field: str, num_bytes: int) -> None:
        if num_bytes > self._max_message_bytes:
            raise InvalidRequest(field, f"the answer takes {num_bytes} bytes, the limit is {self._max_message_bytes}")


def check_num_ids(num_ids: int, limits: Limits) -> None:
    """Refuse more ids than a context holds. Raises InvalidRequest."""
    if num_ids > limits.max_model_len:
        raise InvalidRequest(
            "token_ids", f"{num_ids} ids are more than a context of {limits.max_model_len} tokens holds"
        )
