"""Shows the services' logs as they grow, each line under its service's name."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specdec.commands.up.cluster import Cluster

_STYLES = ("green", "cyan", "magenta", "yellow", "blue")


class LogView:
    """Follows the log files of a cluster."""

    def __init__(self, cluster: Cluster, console: Console) -> None:
        self._console = console
        self._logs = {name: service.log_path for name, service in cluster.services.items()}
        self._offsets = dict.fromkeys(self._logs, 0)
        self._width = max(map(len, self._logs))

    def show_new_lines(self) -> None:
        """Print the whole lines that were written since the last call."""
        for style, (name, path) in zip(_STYLES * len(self._logs), self._logs.items(), strict=False):
            with path.open("rb") as log:
                log.seek(self._offsets[name])
                data = log.read()
            lines, newline, _rest = data.rpartition(b"\n")
            self._offsets[name] += len(lines) + len(newline)
            for line in lines.decode("utf-8", errors="replace").splitlines():
                self._console.print(Text.assemble((f"{name:<{self._width}} ", style), line), soft_wrap=True)
