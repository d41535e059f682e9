"""A streamed completion, read by a thread of its own."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable

from specdec.drafting.endpoints.calls import ApiFault, Endpoint, stream_completion
from specdec.drafting.endpoints.ledger import Ledger, Reservation

_MOST_CHARS_PER_TOKEN = 64
"""Characters per requested token above which an answer is refused."""


class CompletionStream:
    """The text after a prompt as it arrives. A thread of its own reads the endpoint; the engine's thread reads `text`.

    The engine's thread closes it after its time limit. Received text stays readable.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        reservation: Reservation,
        prompt: str,
        on_fault: Callable[[str], None],
    ) -> None:
        """`on_fault` is called from the stream's thread with the kind of a failure."""
        self._endpoint = endpoint
        self._ledger = ledger
        self._reservation = reservation
        self._prompt = prompt
        self._on_fault = on_fault
        self._connection = endpoint.connect()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._counted: int | None = None
        self._num_pieces = 0
        self.text = ""
        """Text received so far; it only grows."""
        self.is_over = False
        """No more text comes."""
        self.has_failed = False
        """The call failed."""
        self.is_complete = False
        """The endpoint ended the text with reason `stop`."""
        self._thread = threading.Thread(target=self._run, name="openai-api", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading, so that the endpoint can stop writing. Never blocks."""
        with self._lock:
            self._is_closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. Returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._connection.connect()
            with self._lock:
                self._socket = self._connection.sock  # http.client drops it if the answer closes the connection
                if self._is_closed:
                    return
            self._read()
        except ApiFault as fault:
            self._fail(fault.kind)
        except TimeoutError:
            self._fail("timeout")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._fail(type(error).__name__)
        finally:
            self.is_over = True
            self._connection.close()
            self._ledger.settle(self._reservation, min(self._num_pieces, self._reservation.max_tokens), self._counted)

    def _read(self) -> None:
        most_chars = _MOST_CHARS_PER_TOKEN * self._reservation.max_tokens
        prompt, self._prompt = self._prompt, ""
        for piece in stream_completion(self._endpoint, self._connection, prompt, self._reservation.max_tokens):
            self._num_pieces += bool(piece.text)
            if piece.num_completion_tokens is not None:
                self._counted = piece.num_completion_tokens
            if len(self.text) + len(piece.text) > most_chars:
                raise ApiFault("too_much")
            self.text += piece.text
            self.is_complete = self.is_complete or piece.finish_reason == "stop"
            if self._is_closed:
                return

    def _fail(self, kind: str) -> None:
        if not self._is_closed:
            self.has_failed = True
            self._on_fault(kind)
