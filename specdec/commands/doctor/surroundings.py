"""What stands around a deployment: Prometheus, its alerts, the report of an audit, keys of tenants."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.commands.doctor.findings import Finding, failed, passed, warned
from specdec.v1 import coordinator_pb2 as api

_MOST_BYTES = 8 * 2**20
_TIMEOUT_S = 10.0
WATCHED = {
    "acceptance": "specdec_target_accepted_tokens_total",
    "how late drafts are": "specdec_coordinator_draft_latency_seconds_count",
    "waiting for drafts": "specdec_target_hold_off_seconds_count",
}
"""What a dashboard of speculation cannot do without."""
ALERT = "SpecdecLowAcceptance"


def check_prometheus(url: str | None) -> Iterator[Finding]:
    """Whether a Prometheus scrapes what matters, and has the alert on acceptance; `url` None: not told which."""
    scraped, alerts = "metrics are scraped", "falling acceptance raises an alert"
    if url is None:
        yield warned(scraped, "not asked", "name your Prometheus with --prometheus")
        yield warned(alerts, "not asked", f"deploy/prometheus has the alert {ALERT}")
        return
    try:
        missing = [name for name, metric in WATCHED.items() if not _ask(url, "query", query=metric)["result"]]
        rules = [rule["name"] for group in _ask(url, "rules")["groups"] for rule in group["rules"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield failed(scraped, f"{url} does not answer as Prometheus does: {error}", "look at the URL")
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
    """Whether an audit of these weights at a temperature above 0 has passed; `report` is its JSON."""
    what, do = "an audit of sampling has passed", "run `specdec audit --report FOLDER`, and name its JSON with --audit"
    if report is None:
        return warned(what, "no report was given", do)
    try:
        told = json.loads(report.read_text("utf-8"))
        found, when, checkpoint = told["audit"], told["when"], told["checkpoint"]
        audited = str(told.get("weights_digest", ""))
        is_lossless, speculated, num_tests = found["is_lossless"], found["speculated"], len(found["fits"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return failed(what, f"{report} is no report of an audit: {error!r}", do)
    measured = f"{checkpoint}, {when}, {num_tests} tests of sampling"
    if not is_lossless:
        return failed(what, f"{measured}: it failed", "see the report; until it is mended, decode plainly")
    if audited and info.target.weights_digest not in ("", audited):
        return warned(what, f"{measured}: of other weights than those that are served", do)
    if not num_tests or speculated is False:
        return warned(what, f"{measured}; nothing sampled, or nothing speculated", do)
    return passed(what, measured)


def check_tenants(info: api.GetModelInfoResponse, has_key: bool) -> Finding:
    """Whether callers are told apart; what drafters remember is kept by tenant."""
    what = "tenants are isolated"
    shares = "suffix" in info.drafters
    if has_key:
        return passed(what, "an API key names the tenant; caches and what drafters remember are kept by tenant")
    measured = "answers came without an API key"
    if shares:
        measured += "; suffix remembers outputs of who has the same tenant"
    return warned(what, measured, "give tenants keys (`specdec keys`), unless all callers are one")


def check_draft_death() -> Finding:
    """A tool that only asks cannot know."""
    do = "stop a draft while a stream runs: it goes on, plainly (docs/protocol.md#failures)"
    return warned("the death of a draft is tested", "not from here", do)


def _ask(url: str, path: str, **query: str) -> Any:
    whole = f"{url.rstrip('/')}/api/v1/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    if not whole.startswith(("http://", "https://")):
        raise ValueError("no http URL")
    with urllib.request.urlopen(whole, timeout=_TIMEOUT_S) as response:
        return json.loads(response.read(_MOST_BYTES))["data"]
