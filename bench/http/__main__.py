"""Measures the latency that a gateway adds to gRPC, and the streams that one core of a gateway carries.

    python -m bench.http
    python -m bench.http --streams 1,64 --seconds 6 --load 64,128,192

The gateway is the real one, a process pinned to a core of its own. Its coordinator only streams 50 tokens a second to
each request (`upstream.py`), on the clients' core. Every token carries the time at which it was sent, so the figures of
gRPC and HTTP are transit times of tokens, even of tokens that were sent late. The kernel counts CPU time and memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from subprocess import Popen
from typing import Annotated, Any

import psutil
import typer
import uvloop
from rich.console import Console

from bench import report
from bench.http.clients import Timed, over_grpc, over_http
from specdec.client import Client
from specdec.commands.measuring.report import Report, machine
from specdec.commands.measuring.tables import Table
from specdec.commands.up.cluster import free_port

_PATIENCE_S = 30.0
_SPREAD_S = 2.0
"""Seconds over which the streams begin, so that a new stream meets running ones."""
_MS = 1e6
app = typer.Typer(add_completion=False)


@contextmanager
def _process(command: Sequence[str], core: int, port: int) -> Iterator[psutil.Process]:
    """Run a process on one core; entered once it listens on the port."""
    with Popen([sys.executable, *command], preexec_fn=lambda: os.sched_setaffinity(0, {core})) as process:
        try:
            known = psutil.Process(process.pid)
            ends_s = time.monotonic() + _PATIENCE_S
            while not any(c.laddr.port == port for c in known.net_connections() if c.status == psutil.CONN_LISTEN):
                if time.monotonic() > ends_s or process.poll() is not None:
                    raise RuntimeError(f"{command} does not listen")
                time.sleep(0.05)
            yield known
        finally:
            process.terminate()


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _all_over_grpc(address: str, num_streams: int, num_tokens: int) -> list[Timed]:
    async with Client(address) as client:
        await over_grpc(client, 1)

        async def one(number: int) -> Timed:
            await asyncio.sleep(number * _SPREAD_S / num_streams)
            return await over_grpc(client, num_tokens)

        return await asyncio.gather(*map(one, range(num_streams)))


async def _all_over_http(port: int, num_streams: int, num_tokens: int) -> list[Timed]:
    await over_http(port, 1)
    waits = (number * _SPREAD_S / num_streams for number in range(num_streams))
    return await asyncio.gather(*(over_http(port, num_tokens, wait_s) for wait_s in waits))


async def _first_tokens(port: int, address: str, num_requests: int) -> dict[str, list[float]]:
    """TTFT in ms of sequential requests over gRPC and HTTP in turns, without the first tenth."""
    found: dict[str, list[float]] = {"grpc": [], "http": []}
    async with Client(address) as client:
        for _ in range(num_requests):
            for way, asked in (("grpc", over_grpc(client, 1)), ("http", over_http(port, 1))):
                timed = await asked
                found[way].append((timed.first_ns - timed.asked_ns) / _MS)
    return {way: values[len(values) // 10 :] for way, values in found.items()}


def _figures(streams: Sequence[Timed]) -> dict[str, float]:
    """Times of streams in ms; `late` is the time from the coordinator to the client."""
    first = [(timed.first_ns - timed.asked_ns) / _MS for timed in streams]
    late = [delay / _MS for timed in streams for delay in timed.delays_ns]
    return {"ttft_p50": median(first), "late_p50": median(late), "late_p99": quantiles(late, n=100)[98]}


def _added(measured: dict[str, list[dict[str, float]]], name: str) -> float:
    """Median over the repeats of HTTP's figure less gRPC's."""
    return median(http[name] - grpc[name] for http, grpc in zip(measured["http"], measured["grpc"], strict=True))


@app.command()
def main(
    streams: Annotated[
        str, typer.Option(help="Comma-separated numbers of streams for the comparison of times.")
    ] = "1,64",
    load: Annotated[str, typer.Option(help="Comma-separated numbers of streams for the CPU time.")] = "32,64,128",
    seconds: Annotated[float, typer.Option(help="Length of each stream.")] = 5.0,
    repeats: Annotated[int, typer.Option(help="Runs of each comparison, in turns.")] = 3,
    rate: Annotated[float, typer.Option(help="Tokens per second of a stream.")] = 50.0,
    core: Annotated[int, typer.Option(help="Core of the gateway; clients and coordinator share another one.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; without it they are only printed.")
    ] = None,
) -> None:
    """Measure."""
    clients = next(other for other in sorted(os.sched_getaffinity(0)) if other != core)
    os.sched_setaffinity(0, {clients})
    num_tokens, interval_s = round(seconds * rate), 1 / rate
    upstream_port, port = free_port(), free_port()
    address = f"127.0.0.1:{upstream_port}"
    serve = [
        "-m",
        "specdec.gateway",
        f"--coordinators={address}",
        f"--port={port}",
        "--host=127.0.0.1",
        "--log-level=warning",
    ]
    facts = {**machine([clients, core]), "versions": report.versions(), "tokens_per_s": rate, "load": os.getloadavg()}
    told = Report(pair="no models: a scripted coordinator", facts=facts, console=Console())
    with (
        _process(["-m", "bench.http.upstream", str(upstream_port), str(interval_s * 1000)], clients, upstream_port),
        _process(serve, core, port) as gateway,
    ):
        alone = uvloop.run(_first_tokens(port, address, 200))
        table = Table("What HTTP adds (ms, p50)", ["streams", "TTFT gRPC", "TTFT HTTP", "added", "ITL added"])
        table.notes.append("ITL added: the median time by which a token arrives later over HTTP than over gRPC.")
        table.add("1, one token", median(alone["grpc"]), median(alone["http"]), _difference(alone), None)
        raw: dict[str, Any] = {"first tokens": alone}
        for num in map(int, streams.split(",")):
            measured: dict[str, list[dict[str, float]]] = {"grpc": [], "http": []}
            for _ in range(repeats):
                measured["grpc"].append(_figures(uvloop.run(_all_over_grpc(address, num, num_tokens))))
                measured["http"].append(_figures(uvloop.run(_all_over_http(port, num, num_tokens))))
            ttft = {way: median(run["ttft_p50"] for run in runs) for way, runs in measured.items()}
            table.add(num, ttft["grpc"], ttft["http"], _added(measured, "ttft_p50"), _added(measured, "late_p50"))
            raw[f"{num} streams"] = measured
        told.add("added", raw, [table])
        table = Table(
            "A gateway's core", ["streams", "tokens/s", "of a core", "streams per core", "late p50, ms", "p99", "MB"]
        )
        table.notes.append("Streams per core: the running streams divided by the share of a core that they took.")
        raw = {}
        for num in map(int, load.split(",")):
            began_s, busy_s = time.monotonic(), _busy_s(gateway)
            runs = uvloop.run(_all_over_http(port, num, num_tokens))
            wall_s, busy_s = time.monotonic() - began_s, _busy_s(gateway) - busy_s
            figures = _figures(runs)
            tokens_s = (
                sum(timed.num_tokens for timed in runs) / wall_s
            )  # fewer than all streams' rate, as they begin and end one by one
            per_core = tokens_s / rate / (busy_s / wall_s)
            memory = gateway.memory_info().rss / 1e6
            share = busy_s / wall_s
            table.add(num, tokens_s, share, per_core, figures["late_p50"], figures["late_p99"], memory)
            raw[str(num)] = {**figures, "tokens_per_s": tokens_s, "share": share, "per_core": per_core, "mb": memory}
        told.add("load", raw, [table])
    if output is not None:
        Console().print(f"written to {told.save(output, report.file_name('http', 'cpu'))}")


def _difference(found: dict[str, list[float]]) -> float:
    return median(found["http"]) - median(found["grpc"])


if __name__ == "__main__":
    app()
