"""The examples of docs/python-client.md, one after the other as a reader would run them, against a real cluster."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.client import Client, SyncClient
from specdec.commands.up.cluster import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PAGE = (Path(__file__).parents[2] / "docs" / "python-client.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"
EXAMPLES = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)


@pytest.fixture(scope="module")
def printed_by(tiny_cluster: Cluster) -> Callable[[str], str]:
    """What the first example that has a text in it printed; all ran, in their order."""
    names: dict[str, Any] = {"__name__": "examples"}
    printed = []
    for number, source in enumerate(EXAMPLES):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(source.replace(ADDRESS, tiny_cluster.address), f"example {number}", "exec"), names)
        printed.append(output.getvalue())

    def of(text: str) -> str:
        return printed[next(number for number, source in enumerate(EXAMPLES) if text in source)]

    return of


def test_both_clients_complete_the_same_request(printed_by: Callable[[str], str]) -> None:
    first, second = printed_by("client.complete(request)"), printed_by("await client.complete(request)")
    assert len(first.strip()) > 0
    assert first == second


def test_streams_are_printed_as_they_come(printed_by: Callable[[str], str]) -> None:
    assert len(printed_by("in client.generate_resuming(request)")) > 0
    assert re.search(r"\n\d+ of \d+ draft tokens were accepted\n$", printed_by("require_finished"))


def test_tokens_are_printed_with_their_log_probabilities(printed_by: Callable[[str], str]) -> None:
    lines = printed_by("sampling.logprobs").splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"\d+ ['\"].*['\"] \d -?\d+\.\d+", line) for line in lines), lines


def test_the_error_names_the_field(printed_by: Callable[[str], str]) -> None:
    assert printed_by("except InvalidRequest").startswith("sampling.top_p ")


def test_threads_print_an_answer_each(printed_by: Callable[[str], str]) -> None:
    assert len(printed_by("ThreadPoolExecutor").splitlines()) == 4


def test_every_method_is_on_the_page() -> None:
    methods = {
        name
        for kind in (Client, SyncClient)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    assert {name for name in methods if f"`{name}`" not in PAGE} == set()
