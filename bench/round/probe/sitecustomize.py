"""Stamps messages between the processes of a deployment; Python loads it where this folder is on PYTHONPATH.

Each stamp is (stage, monotonic nanoseconds, message). `bench.round.stamps` decodes the messages later. Each process
writes its stamps to `SPECDEC_ROUND_FOLDER` when it ends.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("SPECDEC_ROUND_FOLDER", "")
_stamps: list[tuple[str, int, Any]] = []


def _before(owner: type, name: str, stamp: Callable[..., tuple[str, Any]]) -> None:
    """Make a method record a stamp at each call; `stamp` gets its arguments and returns (stage, message)."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        stage, body = stamp(*args, **kwargs)
        if stage:
            _stamps.append((stage, time.monotonic_ns(), body))
        return method(*args, **kwargs)

    setattr(owner, name, stamped)


def _role(engine: Any) -> str:
    service: str = engine._service
    return service.removesuffix("-engine")


def _host(module: ModuleType) -> None:
    def emitted(_host: Any, session: Any, **body: Any) -> tuple[str, Any]:
        if (verdict := body.get("verdict")) is not None:
            end = verdict.start_position + len(verdict.token_ids)
            return "target engine decides", [(session.session_id, end)]
        return "", None

    _before(module.SessionHost, "emit", emitted)


def _relay(module: ModuleType) -> None:
    def came(stream: Any, payload: bytes) -> tuple[str, Any]:
        return f"{_role(stream._engine)} servicer has answer", (stream.is_link, payload)

    _before(module.RelayedStream, "on_message", came)


def _engine_process(module: ModuleType) -> None:
    def went(engine: Any, stream_id: int, payload: bytes) -> tuple[str, Any]:
        is_link = getattr(engine._sinks.get(stream_id), "is_link", False)
        return f"{_role(engine)} servicer has request", (is_link, payload)

    _before(module.EngineProcess, "send_message", went)


def _decode_loop(module: ModuleType) -> None:
    def verdict_came(_loop: Any, session: Any, verdict: Any) -> tuple[str, Any]:
        return "coordinator has verdict", [(session.session_id, verdict.start_position + len(verdict.token_ids))]

    def proposal_came(_loop: Any, session: Any, _side: Any, proposal: bytes) -> tuple[str, Any]:
        return "coordinator has proposal", (session.session_id, proposal)

    _before(module.DecodeLoop, "on_verdict", verdict_came)
    _before(module.DecodeLoop, "on_proposal", proposal_came)


def _work(module: ModuleType) -> None:
    def entry(_work: Any, session: Any, kind: str, body: Any, _commit: Any) -> tuple[str, Any]:
        if kind != "commit":
            return "", None
        return "draft engine has commit", [(session.session_id, body.start_position + len(body.token_ids))]

    def proposes(_work: Any, session: Any, proposal: Any, *_: Any) -> tuple[str, Any]:
        return "draft engine proposes", [(session.session_id, proposal.start_position)]

    _before(module.DraftWork, "entry", entry)
    _before(module.DraftWork, "send", proposes)


def _pacing(module: ModuleType) -> None:
    def merged(_pacing: Any, session: Any, _depth: int, proposal: Any, _now_s: float) -> tuple[str, Any]:
        if proposal.start_position != session.num_tokens:
            return "", None
        return "in the tree", [(session.session_id, proposal.start_position)]

    _before(module.Pacing, "observe_proposal", merged)


_PATCHES = {
    "specdec.replica.worker.host": _host,
    "specdec.replica.bridge.stream_relay": _relay,
    "specdec.replica.bridge.engine_process": _engine_process,
    "specdec.coordinator.decode_loop": _decode_loop,
    "specdec.drafting.role.work": _work,
    "specdec.target_service.pacing.pacing": _pacing,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Patches the modules of `_PATCHES` once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec, whose loader patches the module at the end."""
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _PATCHES[name](module)

        loader.exec_module = exec_module
        return spec


def _write() -> None:
    if _stamps:
        with open(os.path.join(_FOLDER, f"{os.getpid()}.stamps"), "wb") as file:
            pickle.dump(_stamps, file)


def _exit_at_once(code: int, exit_process: Callable[[int], None] = os._exit) -> None:
    _write()
    exit_process(code)


if _FOLDER:
    sys.meta_path.insert(0, _Finder())
    atexit.register(_write)
    os._exit = _exit_at_once  # type: ignore[assignment]
