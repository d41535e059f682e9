"""What nodes tell each other before the first step, as JSON in frames."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec import __version__
from specdec.config.nodes import NodeSettings
from specdec.engine.checkpoints.files import config_digest, find_model_files, weights_digest
from specdec.engine.checkpoints.folder import read_json
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind, receive_frame, text_frame
from specdec.engine.settings import EngineSettings

MOST_TEXT_BYTES = 1 << 16
_OF_ONE_NODE = frozenset({"model", "revision", "num_threads", "kv_cache_memory_bytes", "gpu_memory_fraction"})
"""Engine settings that may differ: the weights are compared, and the rank with the least room decides."""
MessageT = TypeVar("MessageT", bound=BaseModel)


class Refused(Exception):
    """The leader refuses a node or a rank; the message is its reason."""


class Hello(BaseModel):
    """A node, or one of its ranks. Unknown fields are ignored, so that another version can be told so."""

    model_config = ConfigDict(frozen=True)

    version: str = Field(max_length=100)
    nnodes: int = Field(default=0, ge=0, le=64)
    node_rank: int = Field(default=0, ge=0, le=63)
    settings: dict[str, Any] = Field(default_factory=dict)
    """EngineSettings without those of one node."""
    weights_digest: str = Field(default="", max_length=200)
    config_digest: str = Field(default="", max_length=200)
    """Of config.json, which says how the weights are computed with."""
    rank: int | None = Field(default=None, ge=0, le=63)
    """None: the node itself."""
    token: str = Field(default="", max_length=100)
    """The group's, for ranks."""


class Welcome(BaseModel):
    """The leader's answer to a node; a rank needs nothing of it."""

    token: str = Field(max_length=100)
    store_port: int = Field(ge=1, le=65535)


class Loaded(BaseModel):
    """How a rank computes."""

    numerics_id: str = Field(max_length=1000)


def hello_of(nodes: NodeSettings, engine: EngineSettings) -> Hello:
    """This node's hello. Reads the model's files, about 1 s per GB. Raises ``ModelLoadError``."""
    directory, _ = find_model_files(engine.model, engine.revision)
    settings = engine.model_dump(mode="json", exclude=set(_OF_ONE_NODE))
    return Hello(
        version=__version__,
        nnodes=nodes.nnodes,
        node_rank=nodes.node_rank,
        settings=settings,
        weights_digest="" if engine.load_format == "dummy" else weights_digest(directory),
        config_digest=config_digest(read_json(directory / "config.json")),
    )


def difference(ours: Hello, theirs: Hello) -> str | None:
    """The first thing in which a node differs from the leader, as a reason to refuse it; None if there is none."""
    pairs = [
        ("version", ours.version, theirs.version),
        ("nnodes", ours.nnodes, theirs.nnodes),
        *((name, value, theirs.settings.get(name)) for name, value in ours.settings.items()),
    ]
    for name, here, there in pairs:
        if here != there:
            return f"{name} is {_shown(there)} at node {theirs.node_rank} and {_shown(here)} at the leader"
    if ours.weights_digest != theirs.weights_digest:
        return f"model: node {theirs.node_rank} has other weights than the leader"
    if ours.config_digest != theirs.config_digest:
        return f"model: node {theirs.node_rank} has another config.json than the leader"
    return None


def send(connection: socket.socket, kind: StepKind, message: BaseModel | str = "") -> None:
    """Send a message. Raises OSError."""
    text = message if isinstance(message, str) else message.model_dump_json()
    connection.sendall(text_frame(kind, text).encode())


def receive(connection: socket.socket, kind: StepKind, message: type[MessageT]) -> MessageT:
    """Wait for a message, as long as the socket does. Raises Refused, OSError or BadFrame."""
    return parsed(receive_frame(connection, MOST_TEXT_BYTES), kind, message)


def parsed(frame: StepFrame, kind: StepKind, message: type[MessageT]) -> MessageT:
    """A frame's message. Raises Refused or BadFrame."""
    if frame.kind is StepKind.REFUSED:
        raise Refused(text_of(frame))
    if frame.kind is not kind:
        raise BadFrame(f"a {frame.kind.name} frame in place of {kind.name}")
    try:
        return message.model_validate_json(bytes(frame.payload))
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(map(str, first["loc"])) or kind.name
        raise BadFrame(f"{where}: {first['msg']}") from error


def text_of(frame: StepFrame) -> str:
    """The text of a reason, safe to log."""
    return " ".join(frame.payload.decode(errors="replace").split())[:500]


def _shown(value: Any) -> str:
    return str(value)[:100]
