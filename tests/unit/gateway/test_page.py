"""The page is one file that loads nothing, and its policy lets a browser run that file and no other."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from specdec.gateway.routes.page import SCRIPTS, assembled

ROOT = Path(__file__).parents[3]
TSC = ROOT / ".tools/node_modules/.bin/tsc"
PAGE = assembled()
HTML = PAGE.html.decode()


@pytest.mark.smoke
@pytest.mark.parametrize(("tag", "directive"), [("style", "style-src"), ("script", "script-src")])
def test_the_policy_allows_exactly_what_is_in_the_file(tag: str, directive: str) -> None:
    (inside,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", HTML, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    directives = dict(part.split(" ", 1) for part in PAGE.policy.split("; "))
    assert directives[directive] == f"'sha256-{digest}'"
    assert directives["default-src"] == "'none'" and directives["connect-src"] == "'self'"
    assert "unsafe" not in PAGE.policy


@pytest.mark.smoke
def test_the_file_names_nothing_to_load_and_keeps_nothing() -> None:
    assert not re.findall(r"""\s(?:src|href)=["'](?!#)""", HTML)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", HTML)
    for forbidden in (
        "innerHTML",
        "localStorage",
        "sessionStorage",
        "indexedDB",
        "document.cookie",
        "eval(",
        " style=",
        "onclick=",
    ):
        assert forbidden not in HTML


@pytest.mark.smoke
def test_modules_become_one_script_without_imports() -> None:
    script = HTML.split('<script type="module">')[1]
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:const|let|class|function|async function\*?) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)) > len(SCRIPTS)


def test_modules_name_only_what_they_import_and_what_browsers_have() -> None:
    folder = ROOT / "gateway/page/files"
    options = ["--allowJs", "--checkJs", "--noEmit", "--skipLibCheck", "--moduleResolution", "node"]
    options += ["--target", "es2022", "--module", "es2022", "--lib", "es2023,dom,dom.iterable"]
    sources = [str(folder / name) for name in SCRIPTS]
    run = subprocess.run([str(TSC), *options, *sources], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout


@pytest.mark.smoke
def test_every_field_has_a_label() -> None:
    ids = set(re.findall(r'<(?:input|select|textarea) [^>]*?id="(\w+)"', HTML))
    labelled = set(re.findall(r'<label for="(\w+)"', HTML))
    assert ids - labelled == {"compare"}  # within its label
