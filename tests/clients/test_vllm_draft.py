"""vLLM, unchanged, as the target of our draft service (docs/vllm.md)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.page import ROOT
from tests.support.services.model_pair import ModelPair
from tests.support.services.one_service import running

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]
PROMPTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "import os\n\n\ndef read(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "for index in range(10):\n",
)
NUM_TOKENS = 5
RELEASES = ("vllm", "vllm-0.31")
"""Environments with the newest releases of vLLM."""


class Offline:
    """vLLM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def generate(self, prompts: tuple[str, ...] = PROMPTS) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return found
        raise AssertionError(f"vllm ended: {self._log.read_text()[-4000:]}")


@contextmanager
def vllm(
    release: str, model: Path, folder: Path, speculation: dict[str, Any] | None, **environment: str
) -> Iterator[Offline]:
    log = folder / "vllm.log"
    command = [ROOT / f".tools/clients/{release}/bin/python", ROOT / "tests/support/vllm/offline_main.py", model]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **environment}
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [*command, json.dumps(speculation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **settings, "PYTHONPATH": f"{ROOT}:{ROOT / 'vllm_plugin'}"},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Offline(process, log)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("release", RELEASES)
async def test_vllm_with_our_draft_says_what_it_says_alone_whatever_happens_to_the_draft(
    release: str, shipped_pair: ModelPair, tmp_path: Path
) -> None:
    with vllm(release, shipped_pair.target, tmp_path, None) as alone:
        plain = alone.generate()
    own = {"method": "draft_model", "model": str(shipped_pair.draft), "num_speculative_tokens": NUM_TOKENS}
    with vllm(release, shipped_pair.target, tmp_path, own) as itself:
        drafted = itself.generate()
    assert drafted["ids"] == plain["ids"]
    ours = {"method": "custom_class", "model": "specdec_vllm.RemoteDraft", "num_speculative_tokens": NUM_TOKENS}
    async with running("draft", {"model": str(shipped_pair.draft)}, tmp_path) as draft:
        with vllm(release, shipped_pair.target, tmp_path, ours, SPECDEC_VLLM_DRAFTS=draft.spec.address) as remote:
            remote.generate(PROMPTS[:1])  # until here the draft is ready
            before = remote.generate(PROMPTS[:1])
            found = remote.generate()
            assert found["ids"] == plain["ids"]
            share = drafted["accepted_tokens"] / drafted["draft_tokens"]
            num_accepted = found["accepted_tokens"] - before["accepted_tokens"]
            num_drafted = found["draft_tokens"] - before["draft_tokens"]
            print(f"accepted: {share:.2f} with draft_model, {num_accepted}/{num_drafted} with ours")  # noqa: T201
            print(f"seconds: {plain['seconds']:.1f} alone, {drafted['seconds']:.1f}, {found['seconds']:.1f}")  # noqa: T201
            assert num_accepted / num_drafted > 0.9 * share
            assert num_accepted > 30
            pid = draft.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            assert remote.generate()["ids"] == plain["ids"]
            os.kill(pid, signal.SIGCONT)
            assert remote.generate()["ids"] == plain["ids"]
            draft.kill()
            assert remote.generate()["ids"] == plain["ids"]
            draft.start()
            again = remote.generate()
            assert again["ids"] == plain["ids"]
