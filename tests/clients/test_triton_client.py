"""docs/open-inference.md with Triton's own client, unchanged: the text of Generate, streamed or not."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api

pytestmark = [pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".tools" / "clients" / "triton" / "bin" / "python"
STREAM = """
import queue
answers = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer("target", [*inputs, tensor("stream", True, "BOOL")], request_id="7")
parts = []
while True:
    result, error = answers.get(timeout=60)
    assert error is None, error
    response = result.get_response()
    assert response.id == "7"
    parts.append(result.as_numpy("text_output")[0].decode())
    if response.parameters["triton_final_response"].bool_param:
        break
client.async_stream_infer("target", [tensor("text_input", b"x", "BYTES"), tensor("stream", False, "BOOL"),
    tensor("sampling_parameters", b'{"temperature": -1}', "BYTES")])
result, error = answers.get(timeout=60)
assert "sampling.temperature" in str(error), error
client.stop_stream()
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("target")
assert not client.is_model_ready("another")
assert client.get_model_metadata("target").platform == "specdec"
assert len(parts) > 1
print("STREAMED" + "".join(parts))
"""


def run(script: Path) -> str:
    done = subprocess.run([str(PYTHON), str(script)], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_tritons_client_reads_what_generate_says(shipped_cluster: Cluster, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "open-inference.md").read_text()
    [install] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert re.findall(r"'(.*)'", install) == (ROOT / "tests/clients/triton.txt").read_text().split("\n")[1:-1]
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example.replace("127.0.0.1:50051", shipped_cluster.address) + STREAM)
    printed = await asyncio.to_thread(run, script)
    whole, _, streamed = printed.partition("STREAMED")
    body = api.GenerateRequest(prompt="def add(a, b):")
    body.sampling.max_tokens, body.sampling.temperature = 24, 0.0
    async with Client(shipped_cluster.address) as client:
        text = (await client.complete(body)).choices[0].text
    assert whole == streamed == text + "\n"
