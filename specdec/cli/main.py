"""Where the `specdec` command begins."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command."""
    # gRPC's own log lines (a peer went away) would stand between the command's. It reads the variable when it is
    # imported, so nothing that imports it comes before. A service's log is for its operator, who wants them.
    if sys.argv[1:2] != ["serve"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from specdec.cli.app import app

    app()


if __name__ == "__main__":
    main()
