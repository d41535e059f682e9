"""`specdec fetch` against a hub on loopback: what it downloads, continues, and refuses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.commands.fetch import described
from specdec.engine.checkpoints.download import Progress

COMMIT = "c" * 40
WEIGHTS = bytes(range(256)) * 100_000
CUT_AT = 12_000_000
CONFIG = b'{"model_type": "llama"}'


class Hub:
    """A hub with one gated model, which counts the bytes that it sends and can cut or spoil them."""

    def __init__(self) -> None:
        self.files = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"not wanted"}
        self.asked: list[tuple[str, str]] = []
        """Method and path, with the range."""
        self.num_cuts = 0
        """Answers that are still to be cut short."""
        self.is_spoilt = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._serve()

            def do_GET(self) -> None:
                self._serve()

            def _serve(self) -> None:
                path = self.path.partition("?")[0]
                if hub.is_down:
                    self._answer(500, b"", {})
                elif self.headers.get("authorization") != "Bearer hf_secret":
                    self._answer(401, b"", {"X-Error-Code": "GatedRepo"})
                elif path == "/api/models/org/name/revision/v2":
                    self._answer(200, json.dumps({"id": "org/name", "sha": COMMIT}).encode(), {})
                elif path == f"/api/models/org/name/tree/{COMMIT}":
                    tree = [hub.entry(name) for name in hub.files]
                    self._answer(200, json.dumps(tree).encode(), {})
                elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
                    self._file(path.rpartition("/")[2])
                else:
                    self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})

            def _file(self, name: str) -> None:
                content = hub.files[name]
                hub.asked.append((self.command, f"{name} {self.headers.get('range', '')}".strip()))
                etag = hub.entry(name).get("lfs", {}).get("oid") or _git_id(content)
                first = int(self.headers.get("range", "bytes=0-")[6:].partition("-")[0])
                body = (b"?" * len(content) if hub.is_spoilt else content)[first:]
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
                if first:
                    headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                self._answer(206 if first else 200, body, headers)

            def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    if hub.is_stalling and len(body) > CUT_AT:
                        hub.may_go_on.wait(30)
                    if hub.num_cuts and len(body) > CUT_AT:
                        hub.num_cuts -= 1
                        self.wfile.write(body[:CUT_AT])
                        self.close_connection = True
                        return
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self.is_down = False
        self.is_stalling = False
        """Large files do not come before `may_go_on` is set."""
        self.may_go_on = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def entry(self, name: str) -> dict[str, Any]:
        """A file in the tree; weights are stored with Git LFS."""
        content = self.files[name]
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}
        about = {"type": "file", "path": name, "size": len(content), "oid": _git_id(content)}
        return about | ({"lfs": lfs} if name.endswith(".safetensors") else {})


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def fetched(hub: Hub, home: Path, *arguments: str, token: str = "hf_secret") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}", "HF_HOME": str(home),
        "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "specdec.commands.main", "fetch", "org/name", "--revision", "v2", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_a_broken_connection_goes_on_where_it_was_and_whole_files_stay(hub: Hub, tmp_path: Path) -> None:
    hub.num_cuts = 1
    done = fetched(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("org/name: 0.02 of 0.02 GiB, ")
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, second = [what for method, what in hub.asked if method == "GET" and what.startswith("model")]
    assert first == "model.safetensors" and 0 < int(second.partition("bytes=")[2].partition("-")[0]) <= CUT_AT
    hub.asked.clear()
    assert fetched(hub, tmp_path).returncode == 0
    assert not [what for method, what in hub.asked if method == "GET"]
    hub.is_down = True
    assert fetched(hub, tmp_path).stdout == done.stdout, "a complete model needs no hub"


def test_a_download_that_takes_too_long_ends_and_goes_on_with_whole_files(hub: Hub, tmp_path: Path) -> None:
    hub.is_stalling = True
    late = fetched(hub, tmp_path, "--timeout-s=2")
    assert late.returncode == 7 and "not downloaded within 2 s" in late.stderr
    hub.is_stalling = False
    hub.may_go_on.set()
    # What another process left, which was killed.
    blobs = tmp_path / "hub/models--org--name/blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    stale, fresh = blobs / "a.0.incomplete", blobs / "b.0.incomplete"
    for part in (stale, fresh):
        part.write_bytes(b"part")
    os.utime(stale, (0, 0))
    done = fetched(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (stale.exists(), fresh.exists()) == (False, True)


def test_damaged_bytes_are_refused_and_deleted(hub: Hub, tmp_path: Path) -> None:
    hub.is_spoilt = True
    done = fetched(hub, tmp_path)
    assert done.returncode == 1
    assert "config.json, model.safetensors of org/name differ from their digests" in " ".join(done.stderr.split())
    hub.is_spoilt = False
    done = fetched(hub, tmp_path)
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_gated_model_without_its_token_is_a_line(hub: Hub, tmp_path: Path) -> None:
    done = fetched(hub, tmp_path, token="hf_wrong")
    assert done.returncode == 1
    assert "org/name is neither a directory nor available from the hub" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_progress_is_bytes_and_speed() -> None:
    progress = Progress(num_bytes=3 << 30, total_bytes=6 << 30, elapsed_s=30.0)
    assert described("a/b", progress) == "a/b: 3.00 of 6.00 GiB, 102 MiB/s"
