"""A real Prometheus that scrapes services on loopback, with the rules of deploy/prometheus."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from specdec.commands.up.cluster import free_port

RULES = Path(__file__).parents[3] / "deploy" / "prometheus"
INTERVAL = "500ms"
NAMESPACE = "llm"
DEADLINE_S = 60.0


class PrometheusServer:
    """Queries of a running Prometheus. All raise URLError; wrong PromQL raises its subclass HTTPError."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.moment_s: float | None = None
        """Unix time at which queries are evaluated; None: the time of the query."""

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query at `moment_s`."""
        moment = {} if self.moment_s is None else {"time": str(self.moment_s)}
        result: list[dict[str, Any]] = self._get("query", {"query": expr, **moment})["result"]
        return result

    def series(self, selector: str) -> list[dict[str, str]]:
        """Return the labels of every series that was ever scraped or recorded."""
        found: list[dict[str, str]] = self._get("series", {"match[]": selector})
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their health, last error and, for alerts, state."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that fire, with their labels and annotations."""
        found: list[dict[str, Any]] = self._get("alerts", {})["alerts"]
        return [alert for alert in found if alert["state"] == "firing"]

    def wait_for_alert(self, name: str, **labels: str) -> dict[str, Any]:
        """Return an alert once it fires with these labels. Raises TimeoutError after DEADLINE_S."""
        wanted = {"alertname": name, **labels}
        for _ in _until_deadline(f"alert {wanted}"):
            for alert in self.alerts():
                if wanted.items() <= alert["labels"].items():
                    return alert
        raise AssertionError("the deadline raises")

    def wait_for_silence(self, *names: str) -> None:
        """Return once none of these alerts fires. Raises TimeoutError after DEADLINE_S."""
        for _ in _until_deadline(f"silence of {names}"):
            if not {alert["labels"]["alertname"] for alert in self.alerts()} & set(names):
                return

    def wait_for(self, expr: str) -> float:
        """Return the Unix time at which a query had series. Raises TimeoutError after DEADLINE_S."""
        for _ in _until_deadline(expr):
            if series := self.query(expr):
                return float(series[0]["value"][0])
        raise AssertionError("the deadline raises")

    def wait_until_ready(self) -> None:
        """Return once queries are served. Raises TimeoutError after DEADLINE_S."""
        for _ in _until_deadline("ready"):
            try:
                with urlopen(f"http://{self._address}/-/ready", timeout=5.0):
                    return
            except URLError:
                continue

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        with urlopen(f"http://{self._address}/api/v1/{path}?{urlencode(parameters)}", timeout=60.0) as response:
            return json.load(response)["data"]


def _until_deadline(what: str) -> Iterator[None]:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.1)
    raise TimeoutError(what)


@contextmanager
def prometheus_server(
    folder: Path, ports: Mapping[str, int], rules: Path = RULES, interval: str = INTERVAL
) -> Iterator[PrometheusServer]:
    """Run a Prometheus with its files in `folder`.

    Args:
        ports: Metrics port on loopback by job.
        rules: Folder of recording.yml and alerts.yml.
        interval: Interval of scrapes and evaluations, and timeout of a scrape.
    """
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules / "recording.yml"), str(rules / "alerts.yml")],
        "scrape_configs": [
            # As in a cluster, where every scrape gets its namespace as a label.
            {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": NAMESPACE}}],
            }
            for job, port in ports.items()
        ],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            server = PrometheusServer(address)
            server.wait_until_ready()
            yield server
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
