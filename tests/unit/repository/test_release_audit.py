"""The comparison of locked releases with an index finds what is withdrawn, and needs no index to pass."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[3]
GOOD, OTHER = "a" * 64, "b" * 64


def page(yanked: bool | str = False, **more: Any) -> dict[str, Any]:
    return {"meta": {"api-version": "1.4"}, "files": [{"hashes": {"sha256": GOOD}, "yanked": yanked}], **more}


PAGES: dict[str, Any] = {
    "good": page(),
    "withdrawn": page("loses data"),
    "held": page(**{"project-status": {"status": "quarantined"}}),
}


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = PAGES.get(self.path.strip("/"))
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def audit(url: str, lock: Path, *lines: str) -> tuple[int, list[str]]:
    lock.write_text("# Written by a test.\n" + "".join(f"{line}\n" for line in lines))
    environment = {**os.environ, "PIP_INDEX_URL": url}
    command = [sys.executable, ROOT / "releases/audit.py", lock]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def pin(name: str, *hashes: str) -> str:
    return f"{name}==1.2 ; python_version < '4' \\\n" + " \\\n".join(f"    --hash=sha256:{each}" for each in hashes)


def test_withdrawn_and_changed_releases_and_projects_that_are_gone_are_found(url: str, tmp_path: Path) -> None:
    names = [pin("good", GOOD), pin("withdrawn", GOOD), pin("held", GOOD), pin("gone", GOOD)]
    assert audit(url, tmp_path / "bad.txt", *names, pin("good", GOOD, OTHER).replace("1.2", "1.3")) == (
        1,
        [
            "withdrawn 1.2: withdrawn: loses data",
            "held: the project is quarantined",
            "gone: the index has no such project",
            "good 1.3: the index has no file of 1 of 2 hashes",
            "5 releases: 4 findings, 0 not known",
        ],
    )
    assert audit(url, tmp_path / "good.txt", pin("good", GOOD)) == (0, ["1 releases: 0 findings, 0 not known"])


def test_an_index_that_is_not_reached_is_told(tmp_path: Path) -> None:
    code, told = audit("http://127.0.0.1:1", tmp_path / "lock.txt", pin("good", GOOD))
    assert code == 0
    assert told[0].startswith("good: not known: ") and told[-1] == "1 releases: 0 findings, 1 not known"
