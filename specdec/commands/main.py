"""Where the `specdec` command begins."""

from __future__ import annotations

import os
import sys

from specdec.service.grpc_polling import poll_in_one_thread


def main() -> None:
    """Run the command."""
    # gRPC's own log lines (a peer went away) would stand between the command's. It reads the variable when it is
    # imported, so nothing that imports it comes before. A service's log is for its operator, who wants them.
    if sys.argv[1:2] != ["serve"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if sys.argv[1:3] == ["serve", "gateway"]:
        poll_in_one_thread()
    from specdec.commands.app import app

    app()


if __name__ == "__main__":
    main()
