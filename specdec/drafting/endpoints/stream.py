"""A completion on its way, read by a thread of its own."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable

from specdec.drafting.endpoints.calls import ApiFault, Endpoint, stream_completion
from specdec.drafting.endpoints.ledger import Ledger, Reservation

_MOST_CHARS_PER_TOKEN = 64
"""An answer that has more text for the tokens it was asked for is garbage."""


class CompletionStream:
    """Text after a prompt, as it comes. The engine's thread reads it and closes; another waits for the endpoint.

    It is closed from outside once its time is over, whatever the endpoint does. What has come stays readable.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        reservation: Reservation,
        prompt: str,
        on_fault: Callable[[str], None],
    ) -> None:
        """`on_fault` is called from the stream's thread with the kind of a fault, if it comes to one."""
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
        """What has come; only ever grows."""
        self.is_over = False
        """Nothing more comes."""
        self.has_failed = False
        """It came to a fault."""
        self.is_complete = False
        """The endpoint ended the text there, and not for its length."""
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
        """Wait for the thread to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._connection.connect()
            with self._lock:
                self._socket = self._connection.sock  # the connection forgets it where its answer is the last one
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
