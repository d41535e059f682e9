"""A block of draft tokens that an endpoint verifies: by one call if greedy, else one call per position, in threads."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Sequence
from typing import Any

from specdec.drafting.endpoints.calls import ApiFault, Endpoint, complete
from specdec.target_service.api.answers import greedy_body, greedy_tokens, next_token, sampled_body
from specdec.wire.sampling_params import SamplingParams

_ANSWER_BYTES = 2**20
_ANSWER_BYTES_PER_TOKEN = 1024
"""Bytes of an answer per prompt token: several times its name, log-probabilities and text."""


class ApiCall:
    """One call in a thread of its own. It is over when `answer` or `fault` is set."""

    def __init__(self, endpoint: Endpoint, body: dict[str, Any]) -> None:
        self._endpoint = endpoint
        self._body = body
        self._connection = endpoint.connect()
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.answer: Any = None
        self.fault: str | None = None
        """Kind of the fault, one word; None: no fault."""
        self._thread = threading.Thread(target=self._run, name="api-target", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        return self.answer is not None or self.fault is not None

    def join(self) -> None:
        """Wait until the call has ended."""
        self._thread.join()

    def close(self) -> None:
        """Close the connection; a call under way ends with a fault. Never blocks."""
        self._is_closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        most_bytes = _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * len(self._body["prompt"])
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            if self._is_closed:
                raise ApiFault("closed")
            self.answer = complete(self._endpoint, self._connection, self._body, most_bytes)
        except ApiFault as fault:
            self.fault = fault.kind
        except TimeoutError:
            self.fault = "timeout"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.fault = type(error).__name__
        finally:
            self._connection.close()


class Block:
    """Draft tokens after committed ones, and the calls that verify them."""

    def __init__(
        self,
        endpoint: Endpoint,
        committed: Sequence[int],
        drafted: Sequence[int],
        params: SamplingParams,
        fields: str,
        begun_at_s: float,
    ) -> None:
        """Begin one call if `params` are greedy, else one for each of the `len(drafted)` + 1 positions.

        `fields`: see `greedy_body`; `begun_at_s`: of time.monotonic.
        """
        self._is_greedy = params.is_greedy
        self._fields = fields
        self._num_prompt_tokens = len(committed) + len(drafted)
        self.drafted = list(drafted)
        self.begun_at_s = begun_at_s
        whole = [*committed, *drafted]
        if self._is_greedy:
            bodies = [greedy_body(endpoint.model, whole, len(drafted), fields)]
        else:
            bodies = [
                sampled_body(endpoint.model, whole[: len(committed) + number], params)
                for number in range(len(drafted) + 1)
            ]
        self.calls = [ApiCall(endpoint, body) for body in bodies]

    @property
    def is_over(self) -> bool:
        """Whether all calls have ended."""
        return all(call.is_over for call in self.calls)

    def join(self) -> None:
        """Wait until all calls have ended."""
        for call in self.calls:
            call.join()

    def close(self) -> None:
        """Close all calls. Never blocks."""
        for call in self.calls:
            call.close()

    def tokens(self, vocab_size: int) -> list[int]:
        """The target's tokens at the `len(drafted)` + 1 positions; each counts if the drafts before it are accepted.

        Raises ApiFault: a call failed, or an answer lacks a token.
        """
        for call in self.calls:
            if call.fault is not None:
                raise ApiFault(call.fault)
        answers = [call.answer for call in self.calls]
        if self._is_greedy:
            return greedy_tokens(answers[0], self._num_prompt_tokens, len(self.drafted), self._fields, vocab_size)
        return [next_token(answer, vocab_size) for answer in answers]
