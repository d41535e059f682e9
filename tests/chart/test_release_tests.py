"""The scripts in the pods of `helm test`: they wait for a release that is still starting, and end in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.chart.rendered import Render

FAILS_TWICE = """#!/bin/sh
echo again >> "$0.calls"
if [ "$(wc -l < "$0.calls")" -lt 3 ]; then printf "UNAVAILABLE:\\n nobody serves" >&2; exit 6; fi
echo "once upon a time"
"""


def arguments(render: Render, name: str) -> list[str]:
    """What a pod's Python is started with."""
    (pod,) = [d for d in render("defaults") if d["kind"] == "Pod" and d["metadata"]["name"].endswith(f"-{name}")]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    assert container["resources"]["limits"] == {"memory": "512Mi"}
    return [str(argument) for argument in container["args"]]


def run(script: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", *script]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}
    )


@contextmanager
def late_server(num_refusals: int, status: int = 503) -> Iterator[str]:
    """A gateway that refuses its first requests; yields its URL."""
    refused = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            is_late = len(refused) < num_refusals
            refused.extend([1] * is_late)
            told: object = {"error": "not yet"} if is_late else {"choices": [{"text": "a time"}]}
            self.send_response(status if is_late else 200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_http_test_waits_for_a_gateway_that_refuses_at_first(render: Render) -> None:
    script, _, prompt, _, *more = arguments(render, "complete")
    with late_server(2) as url:
        done = run([script, url, prompt, "30", *more])
    assert (done.returncode, done.stdout) == (0, "a time\n")


def test_the_http_test_ends_in_a_line_when_nobody_answers_or_the_request_is_wrong(render: Render) -> None:
    script, _, prompt, _, *more = arguments(render, "complete")
    nobody = run([script, "http://127.0.0.1:9", prompt, "1", *more])
    with late_server(1, 400) as url:
        wrong = run([script, url, prompt, "30", *more])
    assert nobody.returncode == wrong.returncode == 1
    assert nobody.stderr.startswith("no answer within 1 s (test.timeoutSeconds): ")
    assert nobody.stderr.count("\n") == wrong.stderr.count("\n") == 1


@pytest.mark.parametrize(("timeout_s", "answers"), [("30", True), ("1", False)])
def test_the_grpc_test_asks_until_it_is_answered(render: Render, tmp_path: Path, timeout_s: str, answers: bool) -> None:
    script, _, *more = arguments(render, "generate")
    client = tmp_path / "specdec"
    client.write_text(FAILS_TWICE)
    client.chmod(0o755)
    done = run([script, timeout_s, *more], PATH=f"{tmp_path}:{os.environ['PATH']}")
    if answers:
        assert (done.returncode, done.stdout) == (0, "once upon a time\n")
    else:
        assert done.returncode == 1
        assert done.stderr.startswith("no answer within 1 s (test.timeoutSeconds): UNAVAILABLE: nobody serves; pods")
        assert done.stderr.count("\n") == 1
