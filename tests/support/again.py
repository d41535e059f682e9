"""Reruns the tests that failed in the last run, each file's alone, to tell defects of the code from tests that a busy
machine fails.

Tests of one file may share a service that failed once. The output lists tests that then pass as to be mended. Failures
in more than `MOST_FILES` files are not rerun.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST_FILES = 4
RUNS = 3


def main() -> int:
    """Return 0 if the failed tests of each of at most `MOST_FILES` files pass three times running, else 1."""
    failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    files = defaultdict(list)
    for test in failed:
        files[test.partition("::")[0]].append(test)
    if not 0 < len(files) <= MOST_FILES:
        typer.echo(f"tests of {len(files)} files failed; those of 1 to {MOST_FILES} are run again")
        return 1
    for file, tests in files.items():
        for run in range(1, RUNS + 1):
            typer.echo(f"\nagain, alone, {run} of {RUNS}: {file}")
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long and not gpu", *tests]
            if subprocess.run(command, check=False).returncode != pytest.ExitCode.OK:
                return 1
    typer.echo("\n  ".join(["\nTO BE MENDED: failed once beside others, then passed alone:", *failed]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
