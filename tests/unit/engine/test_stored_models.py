"""Models in an S3-compatible store: what is downloaded, goes on, is compared, pinned and refused."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.commands.fetch import described
from specdec.engine.checkpoints import stored_model
from specdec.engine.checkpoints.download import Progress
from specdec.engine.checkpoints.files import find_model_files, name_of, pinned
from specdec.engine.checkpoints.stored_model import fetch_stored
from specdec.engine.errors import ModelLoadError
from specdec.engine.settings import EngineSettings
from tests.support.servers.played_store import PlayedStore, played_store

MODEL = "s3://models/org/small"
WEIGHTS = bytes(range(256)) * 20_000
CUT_AT = 2_000_000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "original/params.json": b"{}",
    "empty.txt": b"",
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PlayedStore]:
    with played_store() as store:
        store.objects = {f"org/small/{name}": content for name, content in FILES.items()}
        store.objects |= {"org/small/": b"", "org/small/pytorch_model.bin": b"no", "org/smaller/config.json": b"2"}
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(stored_model, "_WAIT_S", 0.001)
        yield store


def fetched(model: str = MODEL, revision: str | None = None) -> tuple[Path, int]:
    return fetch_stored(model, revision, lambda _: None, 60.0)


def error_of(model: str = MODEL, revision: str | None = None) -> str:
    with pytest.raises(ModelLoadError) as caught:
        fetched(model, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_once_and_served_by_its_folders_name(store: PlayedStore) -> None:
    told: list[Progress] = []
    folder, missing = fetch_stored(MODEL, None, told.append, 60.0)
    assert files_of(folder) == FILES
    assert missing == sum(map(len, FILES.values())) == told[-1].num_bytes == told[-1].total_bytes
    assert described(MODEL, told[-1]).startswith(f"{MODEL}: 0.01 of 0.01 GiB, ")
    num_asked = len(store.asked)
    assert find_model_files(MODEL, None) == (folder, folder.name)
    assert find_model_files(f"{MODEL}/", folder.name[:8]) == (folder, folder.name)
    assert len(store.asked) == num_asked
    assert (name_of(MODEL, folder), store.signed) == ("small", {"mine"})


def test_without_keys_a_public_bucket_is_asked_anonymously(store: PlayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fetched("s3://models/org/smaller")
    assert store.signed == {""}


def test_broken_connections_go_on_where_they_were(store: PlayedStore) -> None:
    store.num_cuts, store.cut_at = 3, CUT_AT
    folder, _ = fetched()
    assert files_of(folder) == FILES
    ranges = sorted(int(each.partition("@")[2]) for each in store.asked)
    assert [first for first in ranges if first] == [CUT_AT, CUT_AT, 2 * CUT_AT]


def test_a_download_that_was_stopped_goes_on_where_it_was(store: PlayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(_seconds: float) -> None:
        raise KeyboardInterrupt

    store.num_cuts, store.cut_at = 1, CUT_AT
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("time.sleep", stops)
        fetched()
    store.asked = []
    folder, missing = fetched()
    assert files_of(folder) == FILES
    assert missing < sum(map(len, FILES.values()))
    assert CUT_AT in {int(each.partition("@")[2]) for each in store.asked}


def test_a_store_that_sends_nothing_is_given_up(store: PlayedStore) -> None:
    store.num_cuts, store.cut_at = 100, 0
    assert "broke off at 0 of" in error_of() and store.num_cuts > 50


@pytest.mark.parametrize("kind", ["md5", "parts", "SHA256", "SHA1", "CRC32"])
def test_other_bytes_than_those_of_the_checksum_are_deleted(kind: str, store: PlayedStore) -> None:
    name, key = "model-00001-of-00002.safetensors", "org/small/model-00001-of-00002.safetensors"
    store.objects = {key: WEIGHTS}
    if kind == "parts":
        store.part_bytes = 2_000_000
        parts = [WEIGHTS[at : at + store.part_bytes] for at in range(0, len(WEIGHTS), store.part_bytes)]
        whole = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
        store.etags[key] = f"{hashlib.md5(whole, usedforsecurity=False).hexdigest()}-{len(parts)}"
        store.headers = {"x-amz-checksum-crc32": base64.b64encode(b"ofPA").decode()}  # Of the parts' checksums.
    elif kind != "md5":
        store.etags[key] = "0" * 32  # Of an encrypted object it is no MD5.
        digests = {"CRC32": zlib.crc32(WEIGHTS).to_bytes(4, "big")}
        digest = digests.get(kind) or hashlib.new(kind, WEIGHTS).digest()
        store.headers = {f"x-amz-checksum-{kind.lower()}": base64.b64encode(digest).decode()}
    store.spoilt = True
    assert error_of() == f"model: {name} of {MODEL} differ from their checksums and are deleted; run it again"
    store.spoilt = False
    folder, _ = fetched()
    assert files_of(folder) == {name: WEIGHTS}


@pytest.mark.parametrize(("etag", "headers"), [("x" * 32, {}), ("0" * 32, {"x-amz-server-side-encryption": "aws:kms"})])
def test_what_has_no_checksum_is_compared_by_size(etag: str, headers: dict[str, str], store: PlayedStore) -> None:
    store.objects, store.headers = {"org/small/config.json": b"{}"}, headers
    store.etags["org/small/config.json"] = etag
    assert files_of(fetched()[0]) == {"config.json": b"{}"}


def test_the_command_prints_the_folder_alone_and_its_warnings_elsewhere(store: PlayedStore) -> None:
    store.objects = {"org/small/config.json": b"{}"}
    store.etags["org/small/config.json"] = "x" * 32
    command = [sys.executable, "-m", "specdec.commands.main", "fetch", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert files_of(Path(done.stdout.removesuffix("\n"))) == {"config.json": b"{}"}
    assert "compared_by_size_only" in done.stderr


def test_a_changed_model_is_another_revision_and_a_named_one_stays(store: PlayedStore) -> None:
    first, _ = fetched()
    store.objects["org/small/config.json"] = b'{"model_type": "qwen3"}'
    second, _ = fetched()
    assert first != second and files_of(first) == FILES
    assert find_model_files(MODEL, first.name) == (first, first.name)
    assert f"{MODEL} has {second.name} now, not {'0' * 16}" in error_of(revision="0" * 16)
    assert "is no revision of s3://" in error_of(revision="main")


def test_all_parts_of_an_engine_read_the_revision_that_was_there_at_its_start(store: PlayedStore) -> None:
    settings = pinned(EngineSettings(model=MODEL))
    folder, revision = find_model_files(MODEL, None)
    store.objects["org/small/config.json"] = b'{"model_type": "qwen3"}'
    num_asked = len(store.asked)
    assert find_model_files(settings.model, settings.revision) == (folder, revision)
    assert pinned(settings) == settings and len(store.asked) == num_asked
    assert pinned(EngineSettings(model=MODEL)).revision not in (None, revision)
    assert pinned(EngineSettings(model=str(folder))).revision is None


def test_an_object_that_changes_during_its_download_is_an_error(
    store: PlayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "org/small/model-00001-of-00002.safetensors"
    store.objects = {key: WEIGHTS}
    store.num_cuts, store.cut_at = 1, CUT_AT
    monkeypatch.setattr("time.sleep", lambda _: store.etags.update({key: "f" * 32}))
    assert "has changed while it was downloaded" in error_of()


def test_files_of_an_earlier_download_serve_while_the_store_is_away(
    store: PlayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = fetched()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert find_model_files(MODEL, None)[0] == folder
    assert "is not available" in error_of("s3://models/org/other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    store.refuses = 403
    assert "AWS_ACCESS_KEY_ID" in error_of()


@pytest.mark.parametrize("name", ["../config.json", "a//x.json", "./x.json", "a\\config.json", "x" * 300 + ".json"])
def test_names_that_are_no_files_of_the_folder_are_refused(name: str, store: PlayedStore, tmp_path: Path) -> None:
    store.objects[f"org/small/{name}"] = b"{}"
    assert "cannot be a file" in error_of()
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("s3://", "is not s3://BUCKET/PATH"),
        ("s3://Bucket/x", "is not s3://BUCKET/PATH"),
        ("s3://models/org/nothing", "has no files of a model"),
        ("s3://models/org/small/original/params.json", "has no files of a model"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(model: str, why: str, store: PlayedStore) -> None:
    assert why in error_of(model)


def test_a_model_larger_than_the_cache_is_refused_before_it_fills_it(
    store: PlayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_model.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert "GiB more, and" in error_of() and store.asked == []


def test_the_command_prints_progress_and_the_folder(store: PlayedStore) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec.commands.main", "fetch", MODEL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files_of(Path(done.stdout.strip())) == FILES
    assert done.stderr.splitlines()[-1].startswith(f"{MODEL}: 0.01 of 0.01 GiB")
