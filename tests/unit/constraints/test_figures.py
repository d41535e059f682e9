"""What compiling constraints took and came to is on the pages of who compiles."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry

from specdec.constraints.grammar.awaited import AwaitedGrammars
from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.grammar.failure import GrammarError
from specdec.constraints.grammar.figures import GrammarFigures, reason_of
from specdec.constraints.grammar.follower import GrammarFollower
from specdec.replica.worker.engine_gauges import EngineGauges
from specdec.telemetry import TargetMetrics
from specdec.v1 import common_pb2 as pb
from tests.support.engine.grammars import compiled, wait_for


class Waiter:
    """A session that does nothing but wait for its grammar."""

    def __init__(self, output: list[int]) -> None:
        self.session_id = "a"
        self.grammar: GrammarFollower | None = None
        self.output = output


def ask(compiler: GrammarCompiler, constraint: pb.Constraint, output: tuple[int, ...] = ()) -> None:
    """Open a session, and let it come to its grammar or its end."""
    faults: list[Exception] = []
    awaited = AwaitedGrammars[Waiter](
        compiler,
        lambda session: session.output,
        lambda session: None,
        lambda session, error: faults.append(error),
        compiler.figures,
    )
    body = pb.OpenSession()
    body.sampling.constraint.CopyFrom(constraint)
    try:
        awaited.open(Waiter(list(output)), body)
        wait_for(compiler.compile(constraint, b""))
        awaited.poll()
    except GrammarError as error:
        faults.append(error)
    assert len(faults) <= 1


def test_what_was_asked_for_compiled_and_refused_is_exported() -> None:
    compiler = compiled()
    for constraint, output in (
        (pb.Constraint(regex="[a-z]{3}"), ()),
        (pb.Constraint(regex="[a-z]{3}"), ()),
        (pb.Constraint(regex="[a-z]{3}"), (500, 500, 500, 500)),
        (pb.Constraint(regex="(?=a)b"), ()),
        (pb.Constraint(regex="a" + "{2}" * 60), ()),
        (pb.Constraint(regex=""), ()),
    ):
        ask(compiler, constraint, output)
    registry = CollectorRegistry()
    gauges = EngineGauges(TargetMetrics(registry))
    for _ in range(2):  # what was told is told once
        gauges.observe_grammars(compiler)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"specdec_target_grammar{name}", labels)

    assert value("_compile_seconds_count") == 3
    assert value("_cache_queries_total") == 5
    assert value("_cache_hits_total") == 2
    assert value("s_cached") == 1
    reasons = {reason: value("_refusals_total", reason=reason) for reason in ("invalid", "too_complex", "output")}
    assert reasons == {"invalid": 2, "too_complex": 1, "output": 1}
    assert value("_refusals_total", reason="busy") == value("_refusals_total", reason="fault") == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GrammarError("constraint", "too many others", code_pb2.RESOURCE_EXHAUSTED), "busy"),
        (GrammarError("constraint.regex", "could not be compiled: KeyError", code_pb2.INTERNAL), "fault"),
        (GrammarError("constraint.regex", "cannot be followed: a limit"), "too_complex"),
        (GrammarError("constraint.json_schema", "is too large"), "too_complex"),
        (GrammarError("open.token_ids", "the constraint does not allow token 3"), "output"),
        (GrammarError("constraint.json_schema", "Unimplemented keys"), "invalid"),
    ],
)
def test_each_refusal_has_its_reason(error: GrammarError, reason: str) -> None:
    figures = GrammarFigures()
    figures.refused(error)
    assert reason_of(error) == reason
    assert figures.refusals == {reason: 1}
