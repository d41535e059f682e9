"""How gRPC waits for messages in this process. Imports no gRPC, which reads it when it is imported."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
_WITHOUT_EVENT_ENGINE = "-event_engine_client"


def poll_in_one_thread() -> None:
    """Have clients read in one thread, where gRPC's event engine hands each message from thread to thread.

    To be called before gRPC is imported; later it has no effect. What the environment says already is left alone.
    """
    os.environ.setdefault(_VARIABLE, _WITHOUT_EVENT_ENGINE)
