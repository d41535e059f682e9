"""Lines of the checklist that need no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.commands.doctor.findings import Finding, FindingOutcome
from specdec.commands.doctor.replicas import check_drafters, check_replicas
from specdec.commands.doctor.settings_file import check_settings
from specdec.commands.doctor.surroundings import ALERT, check_audit, check_prometheus, check_tenants
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.engine.local_pair import MODELS

TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")


def outcomes(findings: Iterator[Finding]) -> dict[str, FindingOutcome]:
    return {finding.what: finding.outcome for finding in findings}


def identity(**changed: Any) -> pb.ModelIdentity:
    fields = {"name": "m", "tokenizer_digest": "t", "weights_digest": "w", "numerics_id": "n", "max_model_len": 100}
    return pb.ModelIdentity(**{**fields, "row_invariant": True, **changed})


def replica(role: str, state: str = "ready", **changed: Any) -> api.ReplicaStatus:
    load = pb.LoadReport(kv_blocks_used=1, kv_blocks_total=10)
    links = [api.LinkStatus(target="target:1", is_direct=True)] if role == "draft" else []
    return api.ReplicaStatus(
        role=role, address=f"{role}:1", state=state, identity=identity(**changed), load=load, links=links
    )


def relayed(reason: str) -> api.ReplicaStatus:
    bad = replica("draft")
    bad.links.add(target="target:2", reason=reason)
    return bad


def lines(*replicas: api.ReplicaStatus, drafters: tuple[str, ...] = ("draft_model",)) -> dict[str, FindingOutcome]:
    info = api.GetModelInfoResponse(target=identity(), drafters=drafters)
    return outcomes(check_replicas(info, api.GetStatusResponse(replicas=replicas)))


def test_replicas_that_fit_together_pass_every_line() -> None:
    found = lines(replica("target"), replica("draft"))
    assert set(found.values()) == {FindingOutcome.PASS}
    assert len(found) == 10


@pytest.mark.parametrize(
    ("bad", "line", "outcome"),
    [
        (replica("draft", tokenizer_digest="other"), "tokenizers are equal by content", FindingOutcome.FAIL),
        (
            replica("draft", draft_vocabulary=pb.DraftVocabulary(method="text", num_shared=5, num_target=9)),
            "tokenizers are equal by content",
            FindingOutcome.WARN,
        ),
        (replica("draft", max_model_len=50), "the draft's context is as long as the target's", FindingOutcome.WARN),
        (replica("target", weights_digest="other"), "one target checkpoint and numerics", FindingOutcome.WARN),
        (relayed("link_targets does not name it"), "drafts and targets talk directly", FindingOutcome.WARN),
        (replica("draft", state="down"), "replicas are ready", FindingOutcome.FAIL),
    ],
)
def test_one_that_does_not_fit_is_told_of(bad: api.ReplicaStatus, line: str, outcome: FindingOutcome) -> None:
    assert lines(replica("target"), replica("draft"), bad)[line] is outcome


@pytest.mark.parametrize(
    ("drafters", "temperature", "told"),
    [
        (["draft_model", "ngram"], 1.0, []),
        (["ngram", "suffix"], 0.0, []),
        (["ngram", "suffix"], 1.0, ["drafters suit the temperature"]),
        (["lookahead", "draft_model"], 0.0, ["rows are cheap enough for lookahead"]),
        (["eagle3"], 1.0, ["eagle3: the layers are those of its training"]),
    ],
)
def test_drafters_that_are_known_not_to_suit_are_told_of(
    drafters: list[str], temperature: float, told: list[str]
) -> None:
    info = api.GetModelInfoResponse(target=identity(device="cpu"), drafters=drafters)
    found = list(check_drafters(info, temperature))
    assert [finding.what for finding in found] == told
    assert all(finding.outcome is FindingOutcome.WARN and finding.do for finding in found)


def test_without_anything_that_drafts_one_line_says_so() -> None:
    assert lines(replica("target"), drafters=())["something drafts"] is FindingOutcome.FAIL
    assert lines(replica("target"), drafters=("ngram",))["something drafts"] is FindingOutcome.PASS


def test_a_settings_file_is_held_against_models_and_known_settings() -> None:
    up = {"target_set": ["max_draft_tokens=6", "drafters=ngram,suffix"], "draft_set": ["max-heads=2"]}
    assert set(outcomes(check_settings(up, TARGET, DRAFT)).values()) == {FindingOutcome.PASS}


@pytest.mark.parametrize(
    ("up", "line", "outcome"),
    [
        ({"draft_set": ["max_heads=nine"]}, "settings of the draft are valid", FindingOutcome.FAIL),
        ({"target_set": ["no_such=1"]}, "settings of the target are valid", FindingOutcome.FAIL),
        ({"target_set": ["drafters=magic"]}, "settings of the target are valid", FindingOutcome.FAIL),
        ({"draft": "/nowhere"}, "the draft exists", FindingOutcome.FAIL),
        (
            {"target_set": ["adaptive_speculation=false"]},
            "speculation stops when it does not pay",
            FindingOutcome.WARN,
        ),
    ],
)
def test_what_is_wrong_in_a_settings_file_is_named(up: Mapping[str, Any], line: str, outcome: FindingOutcome) -> None:
    assert outcomes(check_settings(up, TARGET, DRAFT))[line] is outcome


def test_a_removed_setting_is_a_warning_that_says_what_holds_now() -> None:
    found = list(check_settings({"target_set": ["session_ttl_s=5"]}, TARGET, DRAFT))
    assert {finding.outcome for finding in found} == {FindingOutcome.PASS, FindingOutcome.WARN}
    (warning,) = [finding for finding in found if finding.outcome is FindingOutcome.WARN]
    assert "session_ttl_s was removed" in str(warning) and "60 s" in str(warning)


@pytest.mark.parametrize(
    ("ids", "more", "outcome"),
    [
        ([1, 2], {}, FindingOutcome.PASS),
        (None, {}, FindingOutcome.WARN),
        (None, {"layer_ids": [1, 2]}, FindingOutcome.PASS),
    ],
)
def test_a_heads_layers_are_to_be_named(
    ids: list[int] | None, more: dict[str, Any], outcome: FindingOutcome, tmp_path: Path
) -> None:
    """A head that reads other layers than it was trained on runs, and hardly anything is accepted."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "num_attention_heads": 4}
    config |= {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafters = json.dumps([{"method": "eagle3", "model": str(tmp_path), **more}])
    found = outcomes(check_settings({"target_set": [f"drafters={drafters}"]}, TARGET, DRAFT))
    assert found["eagle3: its files can be read, and layer ids are explicit"] is outcome


def test_a_head_without_files_is_told_of() -> None:
    drafters = json.dumps([{"method": "eagle3", "model": "/nowhere"}])
    found = outcomes(check_settings({"target_set": [f"drafters={drafters}"]}, TARGET, DRAFT))
    assert found["eagle3: its files can be read, and layer ids are explicit"] is FindingOutcome.FAIL


@contextmanager
def prometheus(metrics: set[str], alerts: list[str]) -> Iterator[str]:
    """What answers as Prometheus does about these."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/v1/rules"):
                data: Any = {"groups": [{"rules": [{"name": name} for name in alerts]}]}
            else:
                name = self.path.partition("query=")[2]
                data = {"result": [{"value": [0, "1"]}] if name in metrics else []}
            body = json.dumps({"status": "success", "data": data}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_prometheus_is_asked_for_what_matters_and_for_the_alert() -> None:
    every = {
        "specdec_target_accepted_tokens_total",
        "specdec_coordinator_draft_latency_seconds_count",
        "specdec_target_hold_off_seconds_count",
    }
    with prometheus(every, ["Other", ALERT]) as url:
        assert set(outcomes(check_prometheus(url)).values()) == {FindingOutcome.PASS}
    with prometheus(set(), []) as url:
        assert list(outcomes(check_prometheus(url)).values()) == [FindingOutcome.FAIL, FindingOutcome.WARN]
    assert set(outcomes(check_prometheus(None)).values()) == {FindingOutcome.WARN}
    assert list(outcomes(check_prometheus("file:///etc/passwd")).values()) == [FindingOutcome.FAIL]


def test_only_an_audit_that_sampled_and_speculated_passes(tmp_path: Path) -> None:
    info = api.GetModelInfoResponse()
    report = tmp_path / "audit.json"

    def outcome(**changed: Any) -> FindingOutcome:
        found = {"is_lossless": True, "speculated": True, "fits": [1], **changed}
        report.write_text(json.dumps({"audit": found, "when": "today", "checkpoint": "c"}))
        return check_audit(report, info).outcome

    assert outcome() is FindingOutcome.PASS
    assert outcome(is_lossless=False) is FindingOutcome.FAIL
    assert outcome(fits=[]) is FindingOutcome.WARN
    assert outcome(speculated=False) is FindingOutcome.WARN
    told = json.loads(report.read_text()) | {"weights_digest": "w"}
    told["audit"]["speculated"] = True
    report.write_text(json.dumps(told))
    for served, wanted in (("w", FindingOutcome.PASS), ("other", FindingOutcome.WARN)):
        serving = api.GetModelInfoResponse(target=identity(weights_digest=served))
        assert check_audit(report, serving).outcome is wanted
    report.write_text("[]")
    assert check_audit(report, info).outcome is FindingOutcome.FAIL
    assert check_audit(None, info).outcome is FindingOutcome.WARN


def test_tenants_are_told_apart_by_keys() -> None:
    info = api.GetModelInfoResponse(drafters=["suffix"])
    assert check_tenants(info, has_key=True).outcome is FindingOutcome.PASS
    assert "suffix" in check_tenants(info, has_key=False).measured
