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
    if sys.argv[1:2] == ["health"]:
        _end_at_once(_probe())
    try:
        from specdec.commands.app import app

        app()
    except ModuleNotFoundError as error:
        extra = _extra_with(error.name or "")
        if extra is None:
            raise
        sys.stderr.write(f"error: this needs {error.name}: pip install 'specdec[{extra}]'\n")
        sys.exit(1)


def _probe() -> int:
    import gc

    from specdec.commands.health import probe

    gc.disable()
    return probe(sys.argv[2:])


def _end_at_once(code: int) -> None:
    """Leave without Python's own end, which frees what the system frees anyway: a sixth of a probe's time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _extra_with(module: str) -> str | None:
    """Return the first extra of specdec that brings a module; None: no extra does."""
    import re
    from importlib import metadata

    try:
        lines = metadata.requires("specdec") or []
    except metadata.PackageNotFoundError:
        return None
    wanted = module.partition(".")[0].replace("_", "-")
    found = (re.match(r"""([\w.-]+).*\bextra == ["']([\w-]+)""", line) for line in lines)
    return next((one[2] for one in found if one and one[1] == wanted), None)


if __name__ == "__main__":
    main()
