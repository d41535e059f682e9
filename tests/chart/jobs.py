"""The Jobs of the chart's hooks, run here against the API server that was asked to run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.chart.rendered import Document

VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
_API, _ACCOUNT = "https://kubernetes.default.svc", "/var/run/secrets/kubernetes.io/serviceaccount"


class JobRunner:
    """Runs Python scripts as a service account; other commands are noted and end as `failing` says."""

    token = "token-of-a-job"

    def __init__(self, account: Path) -> None:
        account.mkdir()
        (account / "token").write_text(self.token)
        self._account = account
        self.failing: set[str] = set()
        """Names of Jobs that fail."""
        self.is_forbidden = False
        """The API server refuses all that Jobs ask."""
        self.ran: list[tuple[str, list[str]]] = []
        """Names and commands of all Jobs, and what scripts printed."""

    def run(self, job: Document, api: str) -> Document:
        """The status of a Job when it has ended."""
        name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        command = [*container["command"], *container["args"]]
        is_failed = name in self.failing
        said: list[str] = []
        if command[0] == "python3":
            assert pod["automountServiceAccountToken"] is True
            places = {_API: api, _ACCOUNT: str(self._account)}
            here = [sys.executable, *(places.get(word, word) for word in command[1:])]
            done = subprocess.run(here, capture_output=True, text=True, check=False, timeout=60)
            is_failed, said = done.returncode != 0, [done.stdout + done.stderr]
        self.ran.append((name, said or command))
        condition = "Failed" if is_failed else "Complete"
        return {"failed" if is_failed else "succeeded": 1, "conditions": [{"type": condition, "status": "True"}]}


def allows(rule: Document, method: str, path: str) -> bool:
    """Whether a rule of a Role allows a request."""
    # /api/v1/namespaces/NAMESPACE/RESOURCE[/NAME]
    resource, *name = urlsplit(path).path.split("/")[5:]
    is_named = "resourceNames" not in rule or name == [n for n in rule["resourceNames"] if [n] == name]
    return VERBS[method] in rule["verbs"] and resource in rule["resources"] and is_named
