"""The site of the documentation: it builds of the pages as they are, whole, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "docs" / "site" / "build.py"
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def run(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """A program that knows build.py as `build`."""
    program = f"import sys; sys.path.insert(0, {str(BUILD.parent)!r}); import build; from pathlib import Path; {script}"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, BUILD, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_and_plot_is_on_the_site(site: Path) -> None:
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/results/*.md"), ROOT / "CHANGELOG.md"]
    expected = {path.relative_to(ROOT).with_suffix(".html") for path in pages if path.name != "README.md"}
    expected |= {path.relative_to(ROOT) for path in ROOT.glob("bench/results/*.svg")}
    assert {str(path) for path in expected if not (site / path).is_file()} == set()
    assert "speculative-decoding server" in (site / "index.html").read_text(encoding="utf-8")


def test_search_finds_sections(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "docs/architecture.html#the-idea-everything-follows-from" in index


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    found = {
        tag
        for page in site.rglob("*.html")
        for tag in FETCHED.findall(page.read_text(encoding="utf-8"))
    }  # fmt: skip
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert found == set()
    assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[x](nowhere.md)", "nowhere.md"), ("[x](protocol.md#no-such-section)", "no-such-section")],
    ids=["page", "section"],
)
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, text: str, complaint: str) -> None:
    staged = run("build.stage(Path(sys.argv[1]))", tmp_path)
    assert staged.returncode == 0, staged.stderr
    page = tmp_path / "pages" / "docs" / "architecture.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n{text}\n", encoding="utf-8")
    done = run("sys.exit(build.render(Path(sys.argv[1]), Path(sys.argv[1]) / 'site'))", tmp_path)
    assert done.returncode == 1
    assert complaint in done.stderr + done.stdout


def test_a_page_that_the_menu_lacks_ends_the_build(tmp_path: Path) -> None:
    assert run("build.stage(Path(sys.argv[1]))", tmp_path).returncode == 0
    (tmp_path / "pages" / "docs" / "forgotten.md").write_text("# Forgotten\n", encoding="utf-8")
    done = run("sys.exit(build.render(Path(sys.argv[1]), Path(sys.argv[1]) / 'site'))", tmp_path)
    assert done.returncode == 1
    assert "forgotten.md" in done.stderr + done.stdout
