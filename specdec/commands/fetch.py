"""`specdec fetch`: download a model before a service needs it, as the chart's init container and Job do."""

from __future__ import annotations

import os
import sys
import threading
from typing import Annotated

import typer
from rich.console import Console

from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.views.failures import EXIT_CODES
from specdec.engine.checkpoints.download import Progress
from specdec.engine.checkpoints.download import fetch as fetch_hub_model
from specdec.engine.checkpoints.stored_model import PREFIX, fetch_stored
from specdec.engine.errors import ModelLoadError
from specdec.telemetry import setup_logging

_MIB, _GIB = 1 << 20, 1 << 30
_TERMINAL_S, _LOG_S = 0.5, 15.0
"""Seconds between two lines of progress."""


def fetch(
    model: Annotated[str, typer.Argument(help="Hub id, org/name, or s3://bucket/path.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit; for s3:// the name of the printed folder.", show_default="latest"),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=1e6, help="Seconds for the download.")] = 86400.0,
) -> None:
    """Download a model's files into the cache, where services find them.

    Whole files that are there stay, and a broken connection goes on where it was. What arrives is compared with the
    digests of the hub or store. HF_TOKEN holds the token for gated models, HF_ENDPOINT the URL of a mirror, HF_HOME the
    cache; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and others are as for AWS' tools, and files of s3://
    go below XDG_CACHE_HOME. Prints the folder, whose name is the revision.
    """
    setup_logging("fetch", "warning", "console")  # standard output has the folder alone
    is_terminal = sys.stderr.isatty()

    def tell(progress: Progress) -> None:
        line = described(model, progress)
        sys.stderr.write(f"\r\033[K{line}" if is_terminal else f"{line}\n")
        sys.stderr.flush()

    def give_up() -> None:
        sys.stderr.write(f"\nerror: {model}: not downloaded within {timeout_s:g} s; run it again, whole files stay\n")
        sys.stderr.flush()
        os._exit(EXIT_CODES["DEADLINE_EXCEEDED"])  # The client's threads cannot be ended.

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    with reported_errors(Console(stderr=True, highlight=False)):
        try:
            fetch_model = fetch_stored if model.startswith(PREFIX) else fetch_hub_model
            folder, _ = fetch_model(model, revision, tell, _TERMINAL_S if is_terminal else _LOG_S)
        except ModelLoadError as error:
            raise ClusterFailed(str(error)) from None
        except ModuleNotFoundError as error:  # Images without an engine leave the hub's client out.
            raise ClusterFailed(f"this needs {error.name}: pip install 'specdec[engine]'") from None
        finally:
            timer.cancel()
    if is_terminal:
        sys.stderr.write("\n")
    typer.echo(folder)


def described(model: str, progress: Progress) -> str:
    """One line of progress."""
    speed = progress.num_bytes / _MIB / max(progress.elapsed_s, 1e-3)
    done, total = progress.num_bytes / _GIB, progress.total_bytes / _GIB
    return f"{model}: {done:.2f} of {total:.2f} GiB, {speed:.0f} MiB/s"
