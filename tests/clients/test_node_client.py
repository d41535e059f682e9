"""docs/grpc-clients.md: its program, unchanged but for the address, with the public files of gRPC and Google."""

from __future__ import annotations

import asyncio
import re
import sysconfig
from pathlib import Path

import pytest

from specdec.commands.up.cluster import free_port
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, running

pytestmark = [pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]


async def test_a_program_for_node_goes_on_at_the_next_coordinator_and_reads_an_errors_field(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "grpc-clients.md").read_text()
    [install] = re.findall(r"npm install (.*)", page)
    assert install.split() == (ROOT / "tests/clients/node.txt").read_text().split("\n")[1:-1]
    [program] = re.findall(r"```js\n(.*?)```", page, re.DOTALL)
    port = free_port()
    (tmp_path / "example.js").write_text(program.replace("127.0.0.1:50051", f"127.0.0.1:{port}"))
    (tmp_path / "node_modules").symlink_to(ROOT / ".tools" / "clients" / "node" / "node_modules")
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    (tmp_path / "google").symlink_to(Path(sysconfig.get_path("purelib")) / "google")
    target = ScriptedTarget()
    target.limit = 12
    async with running([target], port=port):
        node = await asyncio.create_subprocess_exec("node", "example.js", cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
        assert node.stdout is not None
        begun = await node.stdout.read(1)
    async with running([ScriptedTarget()], port=port, owner_id="coordinator-2") as harness:
        printed = (begun + await node.stdout.read()).decode()
        body = api.GenerateRequest(prompt="def add(a, b):")
        body.sampling.max_tokens, body.sampling.seed = 24, 7
        whole = await collect(harness.stub.Generate(body))
    said, _, failed = printed.partition("\n3 [")
    assert said == whole.texts[0]
    assert "field: 'sampling.temperature'" in failed
    assert await node.wait() == 0
