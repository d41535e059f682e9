"""Models in moto's S3, whose objects are uploaded by Amazon's SDK, in parts and with its checksums."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig

from specdec.commands.up.cluster import free_port
from specdec.engine.checkpoints.stored_model import fetch_stored
from tests.support.services.faults import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]
MOTO = Path(__file__).parents[2] / ".tools/moto/bin/moto_server"
BUCKET, MODEL = "models", "s3://models/org/tiny"
_MIB = 2**20


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A client of an empty bucket; services and commands of the test find the store by their variables."""
    if not MOTO.is_file():
        pytest.fail(f"{MOTO} is missing; run `make {MOTO.relative_to(Path.cwd())}`")
    port = free_port()
    server = subprocess.Popen([str(MOTO), "-H", "127.0.0.1", "-p", str(port)], stdout=-3, stderr=-3)
    try:
        ends_s = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < ends_s and server.poll() is None
            time.sleep(0.05)
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        client: Any = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("checksum", ["CRC32", "SHA256", "SHA1", None])
def test_what_amazons_sdk_uploads_in_parts_arrives_equal_and_a_changed_byte_is_found(
    checksum: str | None, s3: Any, tmp_path: Path
) -> None:
    weights = hashlib.shake_128(b"weights").digest(20 * _MIB + 12345)
    (tmp_path / "model.safetensors").write_bytes(weights)
    extra = {"ChecksumAlgorithm": checksum} if checksum else {}
    parts = TransferConfig(multipart_threshold=8 * _MIB, multipart_chunksize=8 * _MIB)
    s3.upload_file(
        str(tmp_path / "model.safetensors"), BUCKET, "org/tiny/model.safetensors", ExtraArgs=extra, Config=parts
    )
    s3.put_object(Bucket=BUCKET, Key="org/tiny/config.json", Body=b"{}", **extra)
    told = s3.head_object(Bucket=BUCKET, Key="org/tiny/model.safetensors")
    assert told["ETag"].endswith('-3"')
    folder, missing = fetch_stored(MODEL, None, lambda _: None, 60.0)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert missing == len(weights) + 2
    # The next download of it begins with a part in which a byte is wrong.
    folder.rename(folder.with_name(f"{folder.name}.unfinished"))
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    spoilt = bytearray(weights[: 9 * _MIB])
    spoilt[1000] ^= 1
    (unfinished / "model.safetensors").unlink()
    (unfinished / "model.safetensors.incomplete").write_bytes(spoilt)
    with pytest.raises(Exception, match=r"model\.safetensors of s3://models/org/tiny differ from their checksums"):
        fetch_stored(MODEL, None, lambda _: None, 60.0)
    assert (fetch_stored(MODEL, None, lambda _: None, 60.0)[0] / "model.safetensors").read_bytes() == weights
