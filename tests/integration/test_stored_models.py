"""Models in moto's S3, whose objects Amazon's SDK uploads, and services that serve them from there."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, free_port
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.commands.up.service_process import ServiceProcess
from specdec.engine.checkpoints.stored_model import fetch_stored
from tests.support.servers.played_store import PlayedStore, played_store
from tests.support.services.clusters import TIMEOUTS, TINY_HOLD_OFF_MS
from tests.support.services.faults import PATIENCE_S, eventually, sampled_request, speculated
from tests.support.services.gateways import gateway
from tests.support.services.model_pair import ModelPair
from tests.support.services.one_service import running

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]
MOTO = Path(__file__).parents[2] / ".tools/moto/bin/moto_server"
BUCKET, MODEL = "models", "s3://models/org/tiny"
_MIB = 2**20


def find(url: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lead clients of a store, and services, to this one and to an empty cache of models."""
    compiled = os.environ.get("SPECDEC_NATIVE_CACHE") or str(Path.home() / ".cache" / "specdec" / "native")
    for name, value in {
        "SPECDEC_NATIVE_CACHE": compiled,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }.items():
        monkeypatch.setenv(name, value)


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
        find(f"http://127.0.0.1:{port}", monkeypatch, tmp_path)
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


async def test_a_deployment_of_models_in_a_store_gives_the_tokens_of_their_files_also_after_the_store_has_changed(
    s3: Any, tiny_pair: ModelPair, tiny_cluster: Cluster, tmp_path: Path
) -> None:
    for role, folder in (("target", tiny_pair.target), ("draft", tiny_pair.draft)):
        for path in folder.iterdir():
            s3.upload_file(str(path), BUCKET, f"{role}/{path.name}")
    plan = LocalPlan(
        target_model=f"s3://{BUCKET}/target", draft_model=f"s3://{BUCKET}/draft", device="cpu", free_ports=True,
        target_settings={"adaptive_speculation": False, "hold_off_ms": TINY_HOLD_OFF_MS},
    )  # fmt: skip
    body = sampled_request(3, max_tokens=40)
    async with Client(tiny_cluster.address) as client:
        expected = (await client.complete(body)).choices[0].token_ids
    with Cluster(plan_services(plan, environment={}), log_dir=tmp_path / "logs", timeouts=TIMEOUTS) as cluster:
        cluster.start()
        # Whatever the engines read from now on is of the revision that they have begun with.
        s3.put_object(Bucket=BUCKET, Key="target/config.json", Body=b"{}")
        async with Client(cluster.address) as client:
            assert (await speculated(client, body)).choices[0].token_ids == expected
        async with gateway(cluster.address) as one, one.http() as http:
            fields = {"prompt": list(body.prompt_token_ids.token_ids), "max_tokens": 40, "ignore_eos": True}
            asked = {**fields, "temperature": 1, "seed": 3, "return_token_ids": True}
            answer = await http.post("/v1/completions", json=asked)
            assert answer.json()["choices"][0]["token_ids"] == expected
        cluster.services["target"].kill()
        s3.upload_file(str(tiny_pair.target / "config.json"), BUCKET, "target/config.json")
        cluster.services["target"].start()
        async with Client(cluster.address) as client:
            assert (await client.complete(body)).choices[0].token_ids == expected
    assert "botocore" not in (tmp_path / "logs/target.log").read_text(), "its client logs URLs and keys' places"


@pytest.fixture
def played(tiny_pair: ModelPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PlayedStore]:
    """A store that lies and breaks off, with the tiny target."""
    with played_store() as store:
        store.objects = {f"org/tiny/{path.name}": path.read_bytes() for path in tiny_pair.target.iterdir()}
        find(store.url, monkeypatch, tmp_path)
        yield store


def _lies(store: PlayedStore) -> None:
    store.spoilt = True


def _sends_nothing(store: PlayedStore) -> None:
    store.num_cuts, store.cut_at = 10_000, 0


def _refuses(store: PlayedStore) -> None:
    store.refuses = 403


def _is_cut_short(store: PlayedStore) -> None:
    name = "org/tiny/model.safetensors"
    store.objects[name] = store.objects[name][:-1000]


def _has_no_json(store: PlayedStore) -> None:
    store.objects["org/tiny/config.json"] = b"<html>"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_lies, "differ from their checksums and are deleted; run it again"),
        (_sends_nothing, "broke off at 0 of"),
        (_refuses, "check the bucket, AWS_ENDPOINT_URL"),
        (_is_cut_short, "model.safetensors"),
        (_has_no_json, "config.json cannot be read"),
    ],
)
async def test_a_service_says_in_one_line_what_is_wrong_with_its_model_in_the_store(
    harm: Callable[[PlayedStore], None], said: str, played: PlayedStore, tmp_path: Path
) -> None:
    harm(played)
    async with running("target", {"model": MODEL, "device": "cpu"}, tmp_path) as target:
        assert target.wait(PATIENCE_S), "it does not end"
    lines = [json.loads(line) for line in target.log_path.read_text().splitlines()]
    errors = [line for line in lines if line["level"] in ("error", "critical")]
    assert [error["event"] for error in errors] == ["engine_exited", "startup_failed"]
    for error in errors:
        assert said in error["reason"] and "model: " in error["reason"] and "exception" not in error
    assert target.exit_code == 1


async def test_a_download_of_a_killed_service_goes_on_in_the_next(
    played: PlayedStore, tiny_pair: ModelPair, tmp_path: Path
) -> None:
    name = "model.safetensors"
    size = len(played.objects[f"org/tiny/{name}"])
    played.num_cuts, played.cut_at = 10_000, size // 8

    def arrived() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "cache").rglob(f"{name}.incomplete"))

    async def has_begun() -> bool:
        return arrived() > 0

    async def is_ready(target: ServiceProcess) -> bool:
        return '"event": "model_ready"' in target.log_path.read_text()

    overrides = {"model": MODEL, "device": "cpu"}
    async with running("target", overrides, tmp_path) as target:
        await eventually(has_begun, "a part has arrived")
        target.signal(signal.SIGKILL)
        assert target.wait(PATIENCE_S)
    kept = arrived()
    assert 0 < kept < size
    played.num_cuts, played.asked = 0, []
    async with running("target", overrides, tmp_path) as target:
        await eventually(lambda: is_ready(target), "the model is served")
    assert f"org/tiny/{name}@{kept}" in played.asked
    (whole,) = (tmp_path / "cache").rglob(name)
    assert whole.read_bytes() == (tiny_pair.target / name).read_bytes()
