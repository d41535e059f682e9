"""Objects of an S3-compatible store: their list, their bytes from any position, and whether a file equals its object.

boto3 speaks the protocol: it signs, repeats what a busy store refuses, and finds keys, endpoint and region where AWS'
own tools do (variables, files, the identity of a pod). Without keys requests are anonymous.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engine.errors import ModelLoadError

_PIECE_BYTES = 1 << 20
_CONNECT_S, _READ_S = 10.0, 60.0
"""Seconds for a connection, and between two pieces of an answer."""
_MOST_OBJECTS = 10_000
"""Objects of a model's folder, at most."""
_NAME = re.compile(r"[^\x00-\x1f\x7f\\/]{1,255}")
_MD5 = re.compile(r"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?")
"""An ETag that is the MD5 of the object's bytes, or of its parts' MD5s."""


class StoreUnreachable(ModelLoadError):
    """The store gave no answer."""


class TransferBroken(Exception):
    """A transfer ended before its object's end."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a model."""

    key: str
    name: str
    """Path below the model's folder."""
    num_bytes: int
    etag: str


class ObjectStore:
    """The objects of one bucket. May be used by several threads."""

    def __init__(self, model: str, bucket: str) -> None:
        """`model`: the name of the model in errors. Raises ModelLoadError if boto3 is not installed."""
        try:
            import boto3
            import botocore
            from botocore.config import Config
        except ModuleNotFoundError as error:
            raise ModelLoadError(f"model: {model} needs {error.name}: pip install 'specdec[s3]'") from None
        self._model = model
        self._bucket = bucket
        session = boto3.Session()
        settings: dict[str, Any] = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S}
        with self._told():
            if session.get_credentials() is None:
                settings["signature_version"] = botocore.UNSIGNED
            region = session.region_name or "us-east-1"  # A store that is not Amazon's needs none.
            config = Config(retries={"mode": "standard", "max_attempts": 5}, **settings)
            self._client: Any = session.client("s3", region_name=region, config=config)

    def objects(self, prefix: str) -> list[StoredObject]:
        """The objects below a prefix, which ends in a slash or is empty.

        Raises:
            StoreUnreachable: the store did not answer.
            ModelLoadError: it refuses, or an object cannot be a file.
        """
        found: list[StoredObject] = []
        with self._told():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for entry in page.get("Contents", ()):
                    if not entry["Key"].endswith("/"):  # A marker of a folder.
                        found.append(self._object(entry, prefix))
                if len(found) > _MOST_OBJECTS:
                    raise ModelLoadError(f"model: {self._model} has more than {_MOST_OBJECTS} objects: name its folder")
        return found

    def read(self, stored: StoredObject, first: int) -> Iterator[bytes]:
        """The object's bytes from a position on.

        Raises:
            TransferBroken: the connection broke, or the store does not answer.
            ModelLoadError: the object has changed, or the store refuses.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        place = {"Bucket": self._bucket, "Key": stored.key, "IfMatch": stored.etag, "Range": f"bytes={first}-"}
        try:
            body = self._client.get_object(**place)["Body"]
            with contextlib.closing(body):
                yield from body.iter_chunks(_PIECE_BYTES)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                raise ModelLoadError(
                    f"model: {stored.name} of {self._model} has changed while it was downloaded; run it again"
                ) from None
            raise ModelLoadError(f"model: {stored.name} of {self._model}: {error}") from None
        except (BotoCoreError, HTTPError, OSError) as error:
            raise TransferBroken(str(error)) from error

    def equals(self, stored: StoredObject, path: Path) -> bool | None:
        """Whether a file has the bytes that the store has checksums of; None: it has none that can be compared."""
        with self._told():
            place = {"Bucket": self._bucket, "Key": stored.key}
            told = self._client.head_object(**place, ChecksumMode="ENABLED")
            # Of an object in parts it may be a checksum of the parts' checksums, which some stores do not say.
            is_whole = told.get("ChecksumType") == "FULL_OBJECT" or "-" not in stored.etag
            for name in ("SHA256", "SHA1", "CRC32"):
                if is_whole and (checksum := told.get(f"Checksum{name}")):
                    return _digest(path, name) == base64.b64decode(checksum)
            md5 = _MD5.fullmatch(stored.etag.strip('"'))
            if md5 is None or told.get("ServerSideEncryption", "AES256") != "AES256":
                return None
            if md5[2] is None:
                return _digest(path, "MD5").hex() == md5[1]
            part_bytes = self._client.head_object(**place, PartNumber=1)["ContentLength"]
        if part_bytes < 1 or -(-stored.num_bytes // part_bytes) != int(md5[2]):
            return None  # Its parts differ in size.
        return _digest_of_parts(path, part_bytes) == md5[1]

    def _object(self, entry: Any, prefix: str) -> StoredObject:
        name = entry["Key"].removeprefix(prefix)
        parts = name.split("/")
        if not all(_NAME.fullmatch(part) and part not in (".", "..") for part in parts):
            key = entry["Key"]
            raise ModelLoadError(f"model: the object {key!r:.200} of {self._model} cannot be a file: rename it")
        return StoredObject(entry["Key"], name, int(entry["Size"]), entry["ETag"])

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn boto3's errors into one line."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            remedy = "check the bucket, AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and AWS_ACCESS_KEY_ID"
            raise ModelLoadError(f"model: {self._model} is not available: {error}; {remedy}") from None
        except (BotoCoreError, ValueError) as error:
            raise StoreUnreachable(f"model: {self._model} is not available: {error}") from None


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece


def _digest(path: Path, name: str) -> bytes:
    if name == "CRC32":
        value = 0
        for piece in _pieces(path):
            value = zlib.crc32(piece, value)
        return value.to_bytes(4, "big")
    digest = hashlib.new(name, usedforsecurity=False)
    for piece in _pieces(path):
        digest.update(piece)
    return digest.digest()


def _digest_of_parts(path: Path, part_bytes: int) -> str:
    """The MD5 of the MD5s of a file's parts, in hex."""
    whole = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        left = path.stat().st_size
        while left > 0:
            part, in_part = hashlib.md5(usedforsecurity=False), min(part_bytes, left)
            left -= in_part
            while in_part > 0 and (piece := stream.read(min(_PIECE_BYTES, in_part))):
                part.update(piece)
                in_part -= len(piece)
            whole.update(part.digest())
    return whole.hexdigest()
