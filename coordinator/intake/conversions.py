"""Text to tokens and back, for callers who want nothing generated: fair to tenants, and bounded, as requests are.

They use no tokens of a quota, but a coordinator's time and memory. So the bytes of a call count against the budgets of
bytes until its answer has left, those of the answer if it is the longer of the two; and what is long takes its tenant's
turn in a thread, as long prompts do. The answer is encoded there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from specdec.coordinator.intake.prompt import PromptReader
from specdec.coordinator.intake.text_limits import PromptBytes, TokenizingTurns
from specdec.coordinator.intake.validation import Limits, check_vocabulary
from specdec.coordinator.replicas.fleet import Fleet
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

_INLINE_TOKENS = 1024
"""Their text takes two milliseconds; more would hold up the other streams of this event loop."""

_LEAST_TOKEN_BYTES = 3
"""In the answer to Tokenize: a token's id, and tag and length of its text."""


class Conversions:
    """Answers Tokenize and Detokenize with encoded responses."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        turns: TokenizingTurns,
        prompt_bytes: PromptBytes,
        max_message_bytes: int,
    ) -> None:
        """Convert nothing yet.

        Args:
            fleet: knows what is served.
            limits_of: what clients may ask of a model here.
            turns: where what is long is converted.
            prompt_bytes: budgets that calls count against.
            max_message_bytes: no answer is larger.
        """
        self._max_message_bytes = max_message_bytes
        self._fleet = fleet
        self._limits_of = limits_of
        self._turns = turns
        self._prompt_bytes = prompt_bytes

    async def tokenize(self, request: api.TokenizeRequest, tenant: str, weight: float, held: ExitStack) -> bytes:
        """A TokenizeResponse. What the call holds is given back when `held` is closed.

        Raises:
            InvalidRequest: there is nothing to tokenize, too much, or too much to answer.
            Overloaded: the tenant, or all, have as many bytes here as may be (PROMPT_BYTES_EXCEEDED).
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
        """A DetokenizeResponse; otherwise as `tokenize`."""
        num_bytes = request.ByteSize()
        held.enter_context(self._prompt_bytes.hold(tenant, num_bytes))
        served = self._fleet.require_served(request.model)
        check_detokenized(request.token_ids, self._limits_of(served.identity))
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        token_ids = list(request.token_ids)

        def answer() -> bytes:
            text = served.tokenizer.decode(token_ids, skip)
            own_bytes = served.tokenizer.detokenizers.token_bytes
            tokens = map(own_bytes, token_ids) if request.with_tokens else ()
            return api.DetokenizeResponse(text=text, tokens=tokens).SerializeToString()

        is_long = len(token_ids) > _INLINE_TOKENS
        encoded = await self._turns.run(answer, num_bytes, tenant, weight) if is_long else answer()
        return self._held("token_ids", encoded, num_bytes, tenant, held)

    def _held(self, field: str, encoded: bytes, num_bytes: int, tenant: str, held: ExitStack) -> bytes:
        """An answer, of which what is longer than its request is held, too."""
        self._check_size(field, len(encoded))
        if len(encoded) > num_bytes:
            held.enter_context(self._prompt_bytes.hold(tenant, len(encoded) - num_bytes))
        return encoded

    def _check_size(self, field: str, num_bytes: int) -> None:
        if num_bytes > self._max_message_bytes:
            raise InvalidRequest(field, f"the answer takes {num_bytes} bytes, the limit is {self._max_message_bytes}")


def check_detokenized(token_ids: Sequence[int], limits: Limits) -> None:
    """Token ids to make text of: of the vocabulary, and no more than a context holds."""
    if len(token_ids) > limits.max_model_len:
        raise InvalidRequest(
            "token_ids", f"{len(token_ids)} ids are more than a context of {limits.max_model_len} tokens holds"
        )
    check_vocabulary("token_ids", token_ids, limits)
