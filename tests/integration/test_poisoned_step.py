"""One request that every step raises for, in a real engine process: it fails, and nobody and nothing else does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.rpc import status_pb2

from specdec.config import TargetSettings
from specdec.replica.bridge.engine_process import EngineProcess
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.engine.worker_client import reason_of
from tests.support.scripted.model import make_tokenizer
from tests.support.services.poisoned_target import POISON

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PROMPTS = {"a": [11, 12, 13], "guilty": [21, POISON, 23], "b": [31, 32, 33]}


class Results:
    """What came for each session: its tokens, or its error's reason."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
        self.reasons: dict[str, str] = {}
        self.ended: set[str] = set()
        self.all_ended = asyncio.Event()

    def on_message(self, payload: bytes) -> None:
        for result in target_pb2.VerifyResponse.FromString(payload).results:
            kind = result.WhichOneof("result")
            if kind == "verdict":
                self.tokens[result.session_id] += result.verdict.token_ids
            if kind == "error":
                self.reasons[result.session_id] = reason_of(result.error.status)
            if kind == "error" or (kind == "verdict" and result.verdict.finish_reason):
                self.ended.add(result.session_id)
        if self.ended >= set(PROMPTS):
            self.all_ended.set()

    def on_abort(self, status: status_pb2.Status) -> None:
        raise AssertionError(status)

    def on_engine_gone(self, end: pb.EngineEnd, reason: str) -> None:
        self.reasons["engine"] = reason
        self.all_ended.set()


async def run(entry: str, model: Path) -> Results:
    settings = TargetSettings(model=str(model), device="cpu", num_blocks=64)
    engine = EngineProcess(entry, settings, service="target-engine")
    engine.start()
    try:
        await engine.wait_ready()
        results = Results()
        stream = engine.open_stream(results, "peer")
        request = target_pb2.VerifyRequest(attach=pb.Attach(owner_id="a"))
        for name, prompt in PROMPTS.items():
            request.entries.add(
                session_id=name,
                epoch=1,
                open=pb.OpenSession(
                    token_ids=prompt,
                    num_prompt_tokens=len(prompt),
                    sampling=pb.TokenSampling(
                        temperature=1.0,
                        top_p=1.0,
                        repetition_penalty=1.0,
                        max_tokens=24,
                        ignore_eos=True,
                        seed=3,
                        logit_bias={POISON: -100},
                    ),
                    credit_position=1000,
                ),
            )
        await engine.send_message(stream, request.SerializeToString())
        await results.all_ended.wait()
        assert engine.is_ready
        engine.close_stream(stream)
        return results
    finally:
        await engine.stop(5.0)


async def test_a_request_that_steps_raise_for_ends_alone(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    make_tokenizer().save(str(model / "tokenizer.json"))
    undisturbed = await run("specdec.target_service.worker:run_engine", model)
    disturbed = await run("tests.support.services.poisoned_target:run_engine", model)
    assert undisturbed.reasons == {}
    assert disturbed.reasons == {"guilty": "SESSION_FAULT"}
    assert disturbed.tokens == {**undisturbed.tokens, "guilty": []}
    assert all(len(disturbed.tokens[name]) == 24 for name in ("a", "b"))
