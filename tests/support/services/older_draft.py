"""A draft that reports an older version: `python -m tests.support.services.older_draft --model ...`."""

from __future__ import annotations

import sys

import specdec

VERSION = "0.0.1"

if __name__ == "__main__":
    specdec.__version__ = VERSION
    from specdec.draft_service.__main__ import main

    sys.exit(main())
