"""Writes the dashboards: `python deploy/grafana/build.py`.

They are files of the chart, and Compose mounts them from there. With `--check` nothing is written, and the exit status
is 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from coordinator_page import coordinator
from gateway_page import gateway
from overview_page import overview
from speculation_page import speculation
from tier_pages import draft, target

FOLDER = Path(__file__).parents[2] / "helm/specdec/files/dashboards"


def main() -> int:
    """Write or check all dashboards; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    is_check = parser.parse_args().check
    pages = {page.__name__: page() for page in (overview, gateway, speculation, coordinator, target, draft)}
    texts = {FOLDER / f"{name}.json": json.dumps(page, indent=2) + "\n" for name, page in pages.items()}
    if is_check:
        stale = {path.name for path, text in texts.items() if not path.exists() or path.read_text() != text}
        stale |= {path.name for path in FOLDER.glob("*.json") if path not in texts}
        if stale:
            sys.stderr.write(f"out of date: {', '.join(sorted(stale))}; run python {Path(__file__).name}\n")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
