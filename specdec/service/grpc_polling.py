"""Set how gRPC waits for messages. Imports no gRPC, which reads the setting at its import."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
_WITHOUT_EVENT_ENGINE = "-event_engine_client"


def poll_in_one_thread() -> None:
    """Let clients read in one thread; gRPC's event engine passes each message between threads.

    Call it before gRPC is imported; later it has no effect. A value in the environment is kept.
    """
    os.environ.setdefault(_VARIABLE, _WITHOUT_EVENT_ENGINE)
