"""Checks of a deployment's surroundings: Prometheus, its alerts, the report of an audit, tenants' keys."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.commands.doctor.findings import Finding, failed, passed, warned
from specdec.service.texts import read_text
from specdec.v1 import coordinator_pb2 as api

_MOST_BYTES = 8 * 2**20
_TIMEOUT_S = 10.0
WATCHED = {
    "acceptance": "specdec_target_accepted_tokens_total",
    "how late drafts are": "specdec_coordinator_draft_latency_seconds_count",
    "waiting for drafts": "specdec_target_hold_off_seconds_count",
}
"""Metrics that monitoring of speculation needs."""
ALERT = "SpecdecLowAcceptance"


def check_prometheus(url: str | None) -> Iterator[Finding]:
    """Check that Prometheus has the needed metrics and the alert on acceptance; `url` None: not given."""
    scraped, alerts = "metrics are scraped", "falling acceptance raises an alert"
    if url is None:
        yield warned(scraped, "not checked", "name your Prometheus with --prometheus")
        yield warned(alerts, "not checked", f"deploy/prometheus has the alert {ALERT}")
        return
    try:
        missing = [name for name, metric in WATCHED.items() if not _ask(url, "query", query=metric)["result"]]
        rules = [rule["name"] for group in _ask(url, "rules")["groups"] for rule in group["rules"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield failed(scraped, f"{url} does not answer as Prometheus does: {error}", "check the URL")
        return
    if missing:
        yield failed(
            scraped, f"nothing about {', '.join(missing)}", "scrape targets, drafts and coordinators (docs/metrics.md)"
        )
    else:
        yield passed(scraped, ", ".join(WATCHED))
    if ALERT in rules:
        yield passed(alerts, ALERT)
    else:
        yield warned(alerts, f"{len(rules)} rules, none is {ALERT}", "load deploy/prometheus/alerts.yml")


def check_audit(report: Path | None, info: api.GetModelInfoResponse) -> Finding:
    """Check that an audit of these weights at a temperature above 0 has passed; `report` is its JSON."""
    what, do = "an audit of sampling has passed", "run `specdec audit --report FOLDER`, and name its JSON with --audit"
    if report is None:
        return warned(what, "no report was given", do)
    try:
        content = json.loads(read_text(report))
        found, when, checkpoint = content["audit"], content["when"], content["checkpoint"]
        audited = str(content.get("weights_digest", ""))
        is_lossless, speculated, num_tests = found["is_lossless"], found["speculated"], len(found["fits"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return failed(what, f"{report} is no report of an audit: {error!r}", do)
    measured = f"{checkpoint}, {when}, {num_tests} tests of sampling"
    if not is_lossless:
        return failed(what, f"{measured}: it failed", "see the report, and decode plainly meanwhile")
    if audited and info.target.weights_digest not in ("", audited):
        return warned(what, f"{measured}: its weights are not the served ones", do)
    if not num_tests or speculated is False:
        return warned(what, f"{measured}; nothing sampled, or nothing speculated", do)
    return passed(what, measured)


def check_tenants(info: api.GetModelInfoResponse, has_key: bool) -> Finding:
    """Check that an API key names the tenant; drafters' memories are per tenant."""
    what = "tenants are isolated"
    shares = "suffix" in info.drafters
    if has_key:
        return passed(what, "an API key names the tenant; caches and drafters' memories are per tenant")
    measured = "the deployment answers without an API key"
    if shares:
        measured += "; suffix proposes from earlier outputs of the same tenant"
    return warned(what, measured, "give tenants keys (`specdec keys`), unless all callers may share a tenant")


def check_draft_death() -> Finding:
    """A reminder: this command stops no service."""
    do = "stop a draft while a stream runs; the stream must continue plainly (docs/protocol.md#failures)"
    return warned("the loss of a draft was tested", "not known from here", do)


def _ask(url: str, path: str, **query: str) -> Any:
    whole = f"{url.rstrip('/')}/api/v1/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    if not whole.startswith(("http://", "https://")):
        raise ValueError("not an http URL")
    with urllib.request.urlopen(whole, timeout=_TIMEOUT_S) as response:
        return json.loads(response.read(_MOST_BYTES))["data"]
