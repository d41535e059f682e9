"""Where the `specdec` command begins."""

from __future__ import annotations

import os
import sys

from specdec.service.process import poll_in_one_thread


def main() -> None:
    """Run the command."""
    # gRPC reads the variable when it is imported, so no import of it comes before. Its log lines would disturb a
    # command's output; a service keeps them for its operator.
    if sys.argv[1:2] != ["serve"]:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if sys.argv[1:3] == ["serve", "gateway"]:
        poll_in_one_thread()
    if sys.argv[1:2] == ["health"]:
        _end_at_once(_probe())
    try:
        from specdec.commands.app import app

        app()
    except ModuleNotFoundError as error:
        from specdec.service.process import missing_extra

        if (to_do := missing_extra(error)) is None:
            raise
        sys.stderr.write(f"error: {to_do}\n")
        sys.exit(1)


def _probe() -> int:
    import gc

    from specdec.commands.health import probe

    gc.disable()
    return probe(sys.argv[2:])


def _end_at_once(code: int) -> None:
    """Exit without Python's shutdown, which takes a sixth of a health check's time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
