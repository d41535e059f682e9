"""Predict the runs of a saved calibration again: `python -m bench.calibration FILE.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from bench.calibration.comparison import again

_WIDTH = 200


def main() -> int:
    """Print the tables; write them as Markdown where `--markdown` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="a result of python -m bench --only calibration")
    parser.add_argument("--brief", action="store_true", help="only how many figures agree")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    options = parser.parse_args()
    found = json.loads(options.result.read_text())
    tables = again(found["calibration"], found["pair"])
    console = Console(width=_WIDTH)
    for table in tables[1:] if options.brief else tables:
        table.print(console)
    if options.markdown:
        options.markdown.write_text("\n\n".join(table.markdown() for table in tables))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
