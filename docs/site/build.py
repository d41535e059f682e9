"""Builds the site from the pages of this repository: `python docs/site/build.py [FOLDER]` (default: site).

Pages keep their paths, so links that work in a checkout work on the site; linked files that are no pages (plots,
protos) are copied too. A link that leads nowhere, or a page that the menu lacks, ends the build with exit code 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "deploy/*.md",
    "bench/*.md",
    "bench/results/*.md",
    "helm/*/README.md",
    "models/*.md",
)
MENUS = {
    "MEASURED": ("bench/README.md", "bench/results/*.md"),
    "DECISIONS": ("docs/decisions/README.md", "docs/decisions/*.md"),
}
_CODE_BLOCK = re.compile(r"(?ms)^```.*?^```")
_LINK = re.compile(r"\]\(([^)\s#:]+)[)#]")


def pages() -> list[Path]:
    """All pages, by their path in the repository."""
    return sorted({path.relative_to(ROOT) for pattern in PATTERNS for path in ROOT.glob(pattern)})


def linked_files(page: Path) -> Iterator[Path]:
    """Paths in the repository of linked files that are no pages."""
    text = _CODE_BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        path = (ROOT / page.parent / link).resolve()
        if path.is_file() and path.suffix != ".md":
            yield path.relative_to(ROOT)


def configuration() -> str:
    """mkdocs.yml with the menus that list a folder: the first page of each, then the others, newest first."""
    text = Path(__file__).with_name("mkdocs.yml").read_text(encoding="utf-8")
    for name, patterns in MENUS.items():
        found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern), reverse=True)]
        entries = [f"\n          - {path.relative_to(ROOT)}" for path in dict.fromkeys(found)]
        text = text.replace(f" {name}\n", "".join(entries) + "\n")
    return text


def stage(folder: Path) -> None:
    """Write mkdocs' configuration and pages into a folder."""
    (folder / "mkdocs.yml").write_text(configuration(), encoding="utf-8")
    files = {Path("docs/site/extra.css")} | {file for page in pages() for file in (page, *linked_files(page))}
    for file in files:
        copy = folder / "pages" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy)


def render(folder: Path, site: Path) -> int:
    """Build a staged folder into `site`, which is emptied first; return mkdocs' exit code."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site.resolve())]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(site: Path) -> int:
    """Build the site into a folder; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        return render(Path(folder), site)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
