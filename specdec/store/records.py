"""Encoding of replicas, requests and journalled tokens in Redis.

A token is its id (32 bits, little endian) and its origin (8 bits).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Sequence
from struct import Struct
from typing import Any

from google.protobuf.message import DecodeError

from specdec.store.checks import check_name
from specdec.store.interface import JournalRecord, ReplicaRecord
from specdec.v1.common_pb2 import GetReplicaInfoResponse

_TOKEN = Struct("<IB")
# Bytes per token.
TOKEN_BYTES = _TOKEN.size


def pack_tokens(token_ids: Sequence[int], origins: Sequence[int]) -> bytes:
    """Return the tokens as bytes, TOKEN_BYTES each. There must be one origin per token id."""
    return b"".join(map(_TOKEN.pack, token_ids, origins))


def unpack_tokens(packed: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids and the origins. Bytes after the last whole token are ignored."""
    whole = packed[: len(packed) // TOKEN_BYTES * TOKEN_BYTES]
    tokens = list(_TOKEN.iter_unpack(whole))
    return tuple(token_id for token_id, _ in tokens), tuple(origin for _, origin in tokens)


def encode_replica(replica: ReplicaRecord) -> bytes:
    """A replica's record in the registry."""
    fields = {
        "role": replica.role,
        "address": replica.address,
        "instance_id": replica.instance_id,
        "state": replica.state,
        "info": base64.b64encode(replica.info.SerializeToString()).decode(),
    }
    return json.dumps(fields).encode()


def encode_lasting(replica: ReplicaRecord) -> bytes:
    """What of a replica's record changes the registry's version: all but its load."""
    info = GetReplicaInfoResponse()
    info.CopyFrom(replica.info)
    info.ClearField("load")
    return encode_replica(dataclasses.replace(replica, info=info))


def decode_replica(encoded: bytes) -> ReplicaRecord | None:
    """The replica of a record; None for a record in another form, as another version or another program writes it."""
    try:
        fields = json.loads(encoded)
        return ReplicaRecord(
            role=_name(fields, "role"),
            address=_name(fields, "address"),
            instance_id=_name(fields, "instance_id", may_be_empty=True),
            state=_name(fields, "state"),
            info=GetReplicaInfoResponse.FromString(base64.b64decode(fields["info"])),
        )
    except (ValueError, KeyError, TypeError, DecodeError, binascii.Error, RecursionError):
        return None


def _name(fields: Any, key: str, *, may_be_empty: bool = False) -> str:
    """A field that can be shown. Raises LimitExceeded for escape sequences, halves of characters and megabytes."""
    name = str(fields[key])
    if name or not may_be_empty:
        check_name(key, name)
    return name


def decode_record(answer: Sequence[Any]) -> JournalRecord:
    """A request from a script's answer. Raises ValueError, TypeError or AttributeError for a malformed answer."""
    owner_id, generation, seed, params, ended, tokens, aborted = answer
    if params is None:
        raise ValueError("a request has no params")
    choices = [unpack_tokens(packed) for packed in tokens]
    return JournalRecord(
        owner_id=owner_id.decode(),
        generation=int(generation),
        seed=int(seed),
        params=params,
        token_ids=tuple(token_ids for token_ids, _ in choices),
        origins=tuple(origins for _, origins in choices),
        is_ended=ended == b"1",
        is_aborted=aborted == b"1",
    )
