"""The page before the pair that ships: its trees, its chat, and the same text without speculation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx2
import pytest

from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.gateway.api.answers import TextCompletion
from tests.support.services.browser import Browser, browser
from tests.support.services.clusters import TIMEOUTS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = "def fibonacci(n):\n"
MOST_ANSWERS = 20
DONE = "document.querySelector('#status').textContent.startsWith('Done')"


@pytest.fixture(scope="module")
def url(shipped_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway process before the shared cluster."""
    settings = RoleSettings(overrides={"coordinators": [shipped_cluster.address]})
    spec = service_spec("gateway", "gateway", free_port(), settings, environment=os.environ)
    with Cluster([spec], log_dir=tmp_path_factory.mktemp("gateway"), timeouts=TIMEOUTS) as process:
        process.start()
        yield f"http://{spec.address}"


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as one:
        one.show_as()
        yield one
        assert one.complaints() == []


def test_both_runs_have_the_text_that_any_client_gets_and_say_so(page: Browser, url: str) -> None:
    page.open(url)
    page.fill("#prompt", PROMPT.rstrip("\n"))
    for field, value in (("temperature", "0.7"), ("seed", "11"), ("max_tokens", "64")):
        page.fill(f"#{field}", value)
    page.click("#send")
    page.until(DONE)
    body = {"prompt": PROMPT.rstrip("\n"), "temperature": 0.7, "seed": 11, "max_tokens": 64}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
    texts = page.run("return [...document.querySelectorAll('.output')].map((one) => one.textContent);")
    assert texts == [body["prompt"] + answer["choices"][0]["text"]] * 2
    assert page.text("#verdict").startswith("Equal: all 64 token ids agree. Speed with speculation")
    at_end = "(one) => one.scrollTop + one.clientHeight >= one.scrollHeight - 1"
    page.until(f"[...document.querySelectorAll('.output')].every({at_end})")
    speeds = page.run("return [...document.querySelectorAll('[data-figure=speed]')].map((one) => one.textContent);")
    assert all(float(speed) > 0 for speed in speeds)


def test_a_round_shows_what_was_proposed_and_what_was_taken(page: Browser, url: str) -> None:
    page.open(url)
    page.fill("#max_tokens", "100")
    page.click("#compare")
    page.click("#send")
    page.until(DONE)
    labels = page.run("return [...document.querySelectorAll('.bar')].map((one) => one.getAttribute('aria-label'));")
    assert all(label.startswith(f"Round {n} of {len(labels)}:") for n, label in enumerate(labels, start=1))
    # One that is a word on one line: the middle of others may be nowhere.
    words = "[...document.querySelectorAll('.output .t.draft')].filter((one) => /\\w/.test(one.textContent))"
    page.run(f"{words}.find((one) => one.getClientRects().length === 1).id = 'drafted';")
    page.point_at("#drafted")
    page.until("document.querySelector('.round h3')")
    heading = page.text(".round h3")
    assert "drafted tokens accepted" in heading
    num_taken = page.run("return document.querySelectorAll('.tree .accepted').length;")
    marked = page.run("return [...document.querySelectorAll('.output .now')].map((one) => one.className);")
    assert 1 <= num_taken == sum("draft" in names for names in marked)
    assert "draft" in page.text(".tree") and "target" in page.text(".tree")
    rows = page.run("return [...document.querySelectorAll('.round tbody tr')].map((one) => one.textContent);")
    assert sum("✓ accepted" in row for row in rows) == num_taken
    shown = page.run("return document.querySelectorAll('.bar i.draft').length;")
    assert shown == page.run("return document.querySelectorAll('.output .t.draft').length;")


@pytest.mark.parametrize("speculates", [True, False])
def test_steps_add_up_to_the_output_and_trees_to_its_log_probabilities(url: str, speculates: bool) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "seed": 1, "max_tokens": 60, "logprobs": 0, "return_steps": True}
    body |= {"return_token_ids": True, "speculation": {"enabled": speculates}}
    num_taken = 0
    # Beside others every proposal of a draft may come too late for its step.
    for _ in range(MOST_ANSWERS if speculates else 1):
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
        TextCompletion.model_validate(answer)
        (choice,) = answer["choices"]
        steps, ids, logprobs = choice["steps"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
        places = [place for step in steps for place in range(step["start"], step["start"] + step["num_tokens"])]
        assert places == list(range(60))
        taken = [
            (place, node)
            for step in steps
            for place, node in enumerate((n for n in step["nodes"] if n["state"] == "accepted"), start=step["start"])
            if place < 60
        ]
        assert all(ids[place] == node["id"] for place, node in taken)
        assert [node["logprob"] for _, node in taken] == pytest.approx(
            [logprobs[place] for place, _ in taken], abs=1e-4
        )
        num_taken += len(taken)
        if num_taken:
            break
    assert bool(num_taken) is speculates


def test_a_chat_goes_on_from_what_was_said(page: Browser, url: str) -> None:
    page.open(url)
    page.click("input[value=chat]")
    page.fill("#max_tokens", "12")
    for number, message in enumerate(("Add two numbers.", "And now three."), start=1):
        page.fill("#prompt", message)
        page.click("#send")
        page.until(f"document.querySelectorAll('#messages li').length === {2 * number}")
        assert page.text("#verdict").startswith("Equal: all")
        assert page.run("return document.querySelector('#prompt').value;") == ""
    assert page.run("return [...document.querySelectorAll('#messages b')].map((one) => one.textContent);") == [
        *("You", "Model"),
        *("You", "Model"),
    ]
    page.click("#clear")
    assert page.run("return document.querySelectorAll('#messages li').length;") == 0
