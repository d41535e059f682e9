"""`specdec up`: all services as processes on loopback, until Ctrl-C."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.inputs.config_file import by_parameter, read_config
from specdec.commands.inputs.option_values import no_empty_name, report_folder
from specdec.commands.measuring.progress import Progress
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.devices import device_kind
from specdec.commands.up.drafters import drafter_settings
from specdec.commands.up.mps import SWITCH, shared_by_mps
from specdec.commands.up.placement import choose_placement
from specdec.commands.up.plan import (
    PORTS,
    LocalPlan,
    Placement,
    check_models,
    describe_placement,
    gateway_is_installed,
    plan_services,
    require_engine,
    shipped_model,
)
from specdec.commands.up.supervision import Supervision
from specdec.commands.views.tables import make_table
from specdec.config.drafter_options import DRAFT_MODEL
from specdec.engine.errors import ModelLoadError
from specdec.service.process import ending_signals

_STYLES = ("green", "cyan", "magenta", "yellow", "blue")
_CHECK_S = 0.2
TargetModel = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Target model: folder or hub id. (default: the shipped one)",
        show_default=False,
        callback=no_empty_name,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft", help="Folder or hub id. (default: the shipped one)", show_default=False, callback=no_empty_name
    ),
]
Device = Annotated[
    str, typer.Option(help="Device of the engines; auto takes GPUs if there are any.", metavar="auto|cpu|cuda")
]


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
            try:
                with path.open("rb") as log:
                    if log.seek(0, os.SEEK_END) < self._offsets[name]:  # emptied, or made again, by a cleaner of logs
                        self._offsets[name] = 0
                    log.seek(self._offsets[name])
                    data = log.read()
            except OSError:
                self._offsets[name] = 0
                continue
            lines, newline, _rest = data.rpartition(b"\n")
            self._offsets[name] += len(lines) + len(newline)
            for line in lines.decode("utf-8", errors="replace").splitlines():
                self._console.print(Text.assemble((f"{name:<{self._width}} ", style), line), soft_wrap=True)


def _take_config(context: typer.Context, config: Path | None) -> Path | None:
    """Make a file's values the defaults of the other flags. Raises typer.BadParameter."""
    if config is not None:
        section = read_config(config).get("up", {})
        context.default_map = {**(context.default_map or {}), **by_parameter(context.command, config, "up", section)}
    return config


def up(
    target: TargetModel = None,
    draft: DraftModel = None,
    device: Device = "auto",
    placement: Annotated[
        Literal["auto", "apart", "together"],
        typer.Option(
            help="apart: a draft service with its own cores; together: the target runs the draft in turns with "
            "itself. On CPU auto measures both once and takes the faster one; on GPUs it is apart.",
        ),
    ] = "auto",
    num_targets: Annotated[int, typer.Option(help="Number of target replicas.", min=1)] = 1,
    num_drafts: Annotated[int, typer.Option(help="Number of draft replicas; with 0 decoding is plain.", min=0)] = 1,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafter that the target runs in place of a draft, such as ngram; may be repeated. A head is "
            "METHOD=FOLDER, or METHOD for the shipped one. draft_model keeps the draft.",
            metavar="NAME",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the coordinator.", min=1, max=65535)] = PORTS["coordinator"],
    target_port: Annotated[int, typer.Option(help="Port of the first target.", min=1, max=65535)] = PORTS["target"],
    draft_port: Annotated[int, typer.Option(help="Port of the first draft.", min=1, max=65535)] = PORTS["draft"],
    gateway_port: Annotated[int, typer.Option(help="Port of the gateway.", min=1, max=65535)] = PORTS["gateway"],
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="Start no HTTP gateway.")] = False,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Take free ports, and serve no metrics.")] = False,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Redis in which the services find each other. (default: none)", metavar="URL"),
    ] = None,
    target_set: Annotated[
        list[str] | None,
        typer.Option(help="Any setting of the target; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    draft_set: Annotated[
        list[str] | None,
        typer.Option(help="Any setting of the draft; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    coordinator_set: Annotated[
        list[str] | None, typer.Option(help="Any setting of the coordinator; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    gateway_set: Annotated[
        list[str] | None, typer.Option(help="Any setting of the gateway; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for logs. (default: a temporary one)", file_okay=False, callback=report_folder),
    ] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Show the services' logs.")] = False,
    mps: Annotated[
        bool,
        typer.Option(
            help="Let engines that share a GPU run side by side by NVIDIA MPS, if it is installed.",
            envvar=SWITCH,
        ),
    ] = True,
    config: Annotated[
        Path | None,
        typer.Option(
            help="File with flags of this command; `specdec tune` writes one.",
            dir_okay=False,
            is_eager=True,
            callback=_take_config,
        ),
    ] = None,
) -> None:
    """Start target, draft, coordinator and gateway on this machine; Ctrl-C stops all.

    A service that ends by itself is restarted. Each engine has its own GPU or, without GPUs, its own cores. The
    services also read the variables SPECDEC_TARGET_*, SPECDEC_DRAFT_*, SPECDEC_COORDINATOR_* and SPECDEC_GATEWAY_*.
    """
    console = Console(stderr=True, highlight=False)
    with reported_errors(console), stop_on_signals():
        settings = parse_settings(target_set or [], "--target-set")
        require_engine(settings)
        if drafter:
            if "drafters" in settings:
                raise typer.BadParameter("--target-set sets drafters already", param_hint="--drafter")
            num_drafts = num_drafts if DRAFT_MODEL in drafter or draft else 0
            settings |= drafter_settings(drafter, target=target)
        plan = LocalPlan(
            target_model=target or shipped_model("target"),
            draft_model=draft or (shipped_model("draft") if num_drafts else ""),
            device=device,
            num_targets=num_targets,
            num_drafts=num_drafts,
            ports={"coordinator": port, "target": target_port, "draft": draft_port, "gateway": gateway_port},
            free_ports=free_ports,
            redis_url=redis_url,
            target_settings=settings,
            draft_settings=parse_settings(draft_set or [], "--draft-set"),
            coordinator_settings=parse_settings(coordinator_set or [], "--coordinator-set"),
            gateway=not no_gateway and gateway_is_installed(),
            gateway_settings=parse_settings(gateway_set or [], "--gateway-set"),
        )
        check_models(plan)
        plan = dataclasses.replace(plan, placement=_placement(placement, plan, console))
        with running_cluster(plan, console, log_dir, mps=mps) as cluster:
            console.print(f"Ready at {cluster.address}. Try:", style="bold")
            console.print(
                f'  specdec generate --address {cluster.address} --show-origin --max-tokens 100 "def fibonacci(n):"'
            )
            tell_of_gateway(console, cluster, is_wanted=not no_gateway)
            console.print("A service that ends is restarted. Ctrl-C stops all.", style="dim")
            supervision = Supervision(cluster, lambda line: console.print(escape(line), soft_wrap=True))
            watch(supervision, LogView(cluster, console) if logs else None)


def _placement(wish: Literal["auto", "apart", "together"], plan: LocalPlan, console: Console) -> Placement:
    """The placement; `auto` is measured for one target and one draft on CPU, otherwise it is apart."""
    if wish != "auto":
        return wish
    is_pair = plan.num_targets == 1 and plan.num_drafts == 1 and "drafters" not in plan.draft_settings
    drafts_text = plan.draft_settings.get("heterogeneous_vocab") == "text"  # only a draft service can
    if device_kind(plan.device) != "cpu" or not is_pair or drafts_text:
        return "apart"
    with Progress(console) as progress:
        try:
            choice = choose_placement(plan, progress.tell)
        except ModelLoadError as error:
            raise ClusterFailed(str(error)) from error
    console.print(f"placement: {choice}; --placement sets it.", style="dim")
    return choice.placement


def tell_of_gateway(console: Console, cluster: Cluster, *, is_wanted: bool) -> None:
    """Print the addresses of the page and of OpenAI's API, or why there is no gateway."""
    if "gateway" not in cluster.services:
        if is_wanted:
            console.print("No HTTP gateway: it needs pip install 'specdec\\[gateway]'.", style="dim")
        return
    root = f"http://{cluster.services['gateway'].spec.address}"
    url = f"{root}/v1"
    console.print(f"A page that shows speculation: {root}/", style="bold")
    console.print(f"OpenAI's API: {url}. Try:", style="bold")
    body = '{"prompt": "def fibonacci(n):", "max_tokens": 60, "stream": true}'
    console.print(
        escape(f"  curl -N {url}/completions -H 'content-type: application/json' -d '{body}'"), soft_wrap=True
    )


def watch(supervision: Supervision, log_view: LogView | None) -> None:
    """Run until Ctrl-C. Raises ClusterFailed when a service cannot be restarted."""
    while True:
        supervision.check()
        if log_view is not None:
            log_view.show_new_lines()
        time.sleep(_CHECK_S)


@contextmanager
def running_cluster(
    plan: LocalPlan, console: Console, log_dir: Path | None = None, *, mps: bool = True
) -> Iterator[Cluster]:
    """Start a plan's services, printing progress; stop them at the end. Raises ClusterFailed.

    With `mps`, engines that share a GPU are clients of NVIDIA MPS if it runs or can be started.
    """
    specs = plan_services(plan)
    table = make_table("Services", "service", "address", "place")
    for row in describe_placement(specs):
        table.add_row(*row)
    console.print(table)
    sharing = shared_by_mps(specs, lambda line: console.print(escape(line), style="dim"), is_wanted=mps)
    with sharing as sharing_specs, Cluster(sharing_specs, log_dir=log_dir) as cluster:
        console.print(f"logs: {cluster.log_dir}", style="dim")
        with console.status("starting") as status:

            def show(what: str) -> None:
                waiting = escape(f"waiting for {what}")
                if console.is_terminal:
                    status.update(waiting)
                else:
                    console.print(waiting)

            cluster.start(show)
        try:
            yield cluster
        finally:
            with console.status("stopping"):
                cluster.stop()
            console.print("Stopped.", style="dim")


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act as Ctrl-C; only in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_WORDS: dict[str, object] = {"true": True, "false": False, "null": None}
"""Values that are no text."""


def parse_settings(entries: list[str], flag: str) -> dict[str, object]:
    """Parse NAME=VALUE entries. Raises typer.BadParameter when one is malformed."""
    settings: dict[str, object] = {}
    for entry in entries:
        name, separator, value = entry.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{entry!r} is not NAME=VALUE", param_hint=flag)
        name = name.strip().replace("-", "_")
        settings[name] = _WORDS.get(value, value)
    return settings
