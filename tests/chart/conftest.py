"""The chart, rendered by the real helm."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator

import kubernetes_validate
import pytest
import yaml

from tests.chart.rendered import CASES, CHART, HELM, Document, Helm, Render, case_files


@pytest.fixture(scope="session", autouse=True)
def definitions_of_kubernetes_are_read_once() -> Iterator[None]:
    """Megabytes, which kubernetes_validate reads for each object."""
    utils = kubernetes_validate.utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Runs helm with arguments; its status and output are the caller's to judge."""
    if not HELM.is_file():
        pytest.fail(f"{HELM} is missing; run `make tools`")

    def run(*args: str, values: Document | None = None) -> subprocess.CompletedProcess[str]:
        more = ["--values", "-"] if values is not None else []
        return subprocess.run(
            [str(HELM), *args, *more],
            input=yaml.safe_dump(values) if values is not None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.fixture(scope="session")
def render_text(helm: Helm) -> Callable[..., str]:
    """The text that `helm template` writes for a case."""

    @functools.cache
    def render(name: str, kube_version: str = "1.31.0") -> str:
        case = CASES[name]
        files = case_files(case)
        done = helm(
            "template", "demo", str(CHART), "--namespace", "llm", "--kube-version", kube_version, *files,
            values=case.get("values", {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return render


@pytest.fixture(scope="session")
def render(render_text: Callable[..., str]) -> Render:
    """The objects of a case."""

    def documents(name: str, kube_version: str = "1.31.0") -> list[Document]:
        text = render_text(name, kube_version)
        return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]

    return documents
