"""What the page makes of a stream, run by Node.js: texts, rounds and failures, however the bytes arrive."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).parents[3] / "gateway/page/files"
SCRIPT = """
import { readFileSync } from 'node:fs';
const { folder, cases } = JSON.parse(readFileSync(0, 'utf8'));
const { Run, compared } = await import(folder + '/run.js');
const { nodesOf, roundSentence } = await import(folder + '/tree.js');
const told = [];
for (const one of cases) {
  globalThis.fetch = async () => {
    const stream = new ReadableStream({
      start(controller) {
        for (const chunk of one.chunks) controller.enqueue(Buffer.from(chunk, 'base64'));
        controller.close();
      },
    });
    return new Response(stream, { status: one.status, headers: one.headers });
  };
  const run = new Run('run', true);
  const pieces = [];
  let failure = null;
  try {
    await run.run({ path: 'v1/x', body: {} }, '', new AbortController().signal, (_, some) => pieces.push(...some));
  } catch (error) {
    failure = { message: error.message, param: error.param, delay: error.delay, status: error.status };
  }
  const rounds = run.rounds.map(({ start, num }) => [start, num]);
  const pairs = (round) => nodesOf(run, round).map((node) => [node.state, node.by]);
  const nodes = run.rounds.map((round) => (round.step ? pairs(round) : null));
  const sentences = run.rounds.map((_, number) => roundSentence(run, number));
  const self = compared(run, run, true);
  told.push({ text: run.text, pieces, failure, rounds, nodes, sentences, self, ending: run.ending, speed: run.speed });
}
console.log(JSON.stringify(told));
"""


def answers(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page makes of each of these answers."""
    given = json.dumps({"folder": FILES.as_uri(), "cases": [{"status": 200, "headers": {}, **case} for case in cases]})
    command = ["node", "--experimental-default-type=module", "--no-warnings", "--input-type=module", "--eval", SCRIPT]
    run = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return list(json.loads(run.stdout))


def in_pieces(data: bytes, size: int) -> list[str]:
    return [base64.b64encode(data[at : at + size]).decode() for at in range(0, len(data), size)]


def stream(events: list[dict[str, Any]], *, is_whole: bool = True) -> bytes:
    data = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events)
    return data + (b"data: [DONE]\n\n" if is_whole else b"")


def event(text: str, tokens: list[tuple[str, str]], steps: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """An event of a completion, with tokens as (text, origin)."""
    origins = [{"id": n, "text": own, "origin": origin, "drafter": None} for n, (own, origin) in enumerate(tokens)]
    choice: dict[str, Any] = {"index": 0, "text": text, "token_origins": origins, "finish_reason": None}
    return {"choices": [choice if steps is None else {**choice, "steps": steps}]}


def step(
    start: int, num: int, states: list[str], at_ms: float = 1.0, drafters: list[str | None] | None = None
) -> dict[str, Any]:
    """A step with a chain of nodes in these states, of these drafters."""
    nodes = [
        {"id": 0, "text": "x", "parent": n - 1 if n else None, "score": 0.5, "logprob": -1.0, "state": state}
        | ({} if drafters is None else {"drafter": drafters[n]})
        for n, state in enumerate(states)
    ]
    return {
        "start": start,
        "num_tokens": num,
        "nodes": nodes,
        "at_ms": at_ms,
        "step_ms": 1.0,
        "hold_off_ms": 0.0,
        "draft_ms": 0.0,
        "suspended": False,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100_000])
def test_texts_add_up_whatever_pieces_the_bytes_come_in(size: int) -> None:
    events = [
        event("Héllo", [("Hé", "prefill"), ("llo", "draft")]),
        event("", [("\ufffd", "draft"), ("\ufffd", "draft")]),
        event("🙂 a", [("\ufffd", "bonus"), (" a", "draft"), (" lat", "draft")]),
        event(" later\r\n\n", [("er", "bonus"), ("\r\n\n", "decode")]),
    ]
    (told,) = answers({"chunks": in_pieces(stream(events), size)})
    assert told["failure"] is None
    assert told["text"] == "Héllo🙂 a later\r\n\n" == "".join(piece["text"] for piece in told["pieces"])
    of = {piece["index"]: piece["text"] for piece in told["pieces"]}
    assert (of[0], of[1], of[5], of[6], of[8]) == ("Hé", "llo", " a", " lat", "\r\n\n")


def test_rounds_are_the_servers_and_guessed_where_it_tells_none() -> None:
    tokens = [("a", "prefill"), ("b", "draft"), ("c", "draft"), ("d", "bonus"), ("e", "decode")]
    steps = [step(0, 1, []), step(1, 3, ["accepted", "accepted"], 3.0), step(4, 1, ["rejected"], 5.0)]
    with_steps, without = answers(
        {"chunks": in_pieces(stream([event("abcde", tokens, steps)]), 1000)},
        {"chunks": in_pieces(stream([event("abcde", tokens)]), 1000)},
    )
    assert with_steps["rounds"] == without["rounds"] == [[0, 1], [1, 3], [4, 1]]
    assert with_steps["speed"] == pytest.approx(1000.0)  # four tokens in four milliseconds
    assert with_steps["nodes"][1] == [["accepted", "draft"], ["accepted", "draft"], ["target", ""]]
    assert with_steps["nodes"][2] == [["rejected", "draft"], ["target", ""]]
    assert with_steps["sentences"][1].startswith("Round 2 of 3: 3 tokens, 2 of 2 drafted tokens accepted")
    assert without["nodes"] == [None] * 3


def test_forced_tokens_are_nodes_and_not_told_twice() -> None:
    tokens = [("a", "forced"), ("b", "draft"), ("c", "bonus")]
    (told,) = answers({"chunks": in_pieces(stream([event("abc", tokens, [step(0, 3, ["accepted"] * 2)])]), 999)})
    assert told["nodes"] == [[["accepted", "forced"], ["accepted", "draft"], ["target", ""]]]


def test_nodes_that_were_not_taken_are_of_who_proposed_them_where_that_is_told() -> None:
    drafters = [None, "draft_model", "ngram", "forced"]
    (told,) = answers(
        {
            "chunks": in_pieces(
                stream(
                    [
                        event(
                            "a",
                            [("a", "bonus")],
                            [step(0, 1, ["rejected", "rejected", "rejected", "unverified"], drafters=drafters)],
                        )
                    ]
                ),
                999,
            )
        }
    )
    assert [by for _, by in told["nodes"][0]] == ["draft", "draft", "ngram", "forced", ""]


def test_a_run_is_equal_to_itself() -> None:
    (told,) = answers({"chunks": in_pieces(stream([event("ab", [("a", "prefill"), ("b", "decode")])]), 1000)})
    assert told["self"] == {"kind": "equal", "text": "Equal: all 2 token ids agree."}


def test_failures_are_told_in_words_with_what_to_do() -> None:
    def refusal(status: int, error: Any, **headers: str) -> dict[str, Any]:
        body = error if isinstance(error, bytes) else json.dumps({"error": error}).encode()
        return {"status": status, "headers": headers, "chunks": in_pieces(body, 1000)}

    begun = stream([event("a", [("a", "prefill")])], is_whole=False)
    failed = stream([{"error": {"message": "it broke", "param": None}}])
    keyless, busy, bad, foreign, lost, broken = (
        told["failure"]
        for told in answers(
            refusal(401, {"message": "no key", "param": None}),
            refusal(429, {"message": "full", "param": None}, **{"retry-after": "2.2"}),
            refusal(400, {"message": "too high", "param": "top_p"}),
            refusal(502, b"<html>"),
            {"chunks": in_pieces(begun, 10)},
            {"chunks": in_pieces(begun + failed, 10)},
        )
    )
    assert keyless["param"] == "key" and "no key" in keyless["message"]
    assert busy["delay"] == 3 and busy["message"].startswith("Too many requests")
    assert (bad["param"], bad["message"]) == ("top_p", "top_p: too high")
    assert foreign["message"] == "The server answered 502."
    assert lost["message"].startswith("The connection was lost")
    assert broken["message"] == "it broke"
