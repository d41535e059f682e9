"""As much of a Kubernetes API server as helm needs in the life of a release: objects, patches, Jobs, test pods."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.chart.jobs import JobRunner, allows
from tests.chart.rendered import Document

KINDS = {
    "v1": ("Secret", "Service", "ServiceAccount", "Pod", "ConfigMap", "PersistentVolumeClaim"),
    "apps/v1": ("Deployment",),
    "batch/v1": ("Job",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "resource.k8s.io/v1": ("ResourceClaim",),
}
# What nobody may change: helm's upgrade fails.
FIXED = {
    "Deployment": ("selector",),
    "Job": ("selector", "template"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
    "ResourceClaim": ("devices",),
}


@dataclass
class Cluster:
    """What exists, by path, and the patches that changed something: (kinds/name, patch)."""

    kubeconfig: Path
    jobs: JobRunner
    objects: dict[str, Document] = field(default_factory=dict)
    patches: list[tuple[str, Document]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Objects, as kinds/name, whose patches fail."""

    def named(self, kind: str, name: str) -> Document:
        """An object that exists."""
        (found,) = [o for p, o in self.objects.items() if p.endswith(f"/{_plural(kind)}/{name}")]
        return found

    def listed(self, collection: str, selector: str) -> list[Document]:
        """The objects of a collection that have the labels of a selector (a=b,c=d)."""
        wanted = dict(term.split("=", 1) for term in selector.split(",") if term)
        found = [o for path, o in self.objects.items() if path.rpartition("/")[0] == collection]
        return [o for o in found if wanted.items() <= o["metadata"].get("labels", {}).items()]

    @property
    def workload(self) -> dict[str, Document]:
        """All objects but helm's records, by kinds/name."""
        return {"/".join(p.split("/")[-2:]): o for p, o in self.objects.items() if "sh.helm.release" not in p}


@contextmanager
def api_server(folder: Path) -> Iterator[Cluster]:
    """Serves an empty cluster on loopback."""
    cluster = Cluster(folder / "kubeconfig", JobRunner(folder / "serviceaccount"))

    class Handler(BaseHTTPRequestHandler):
        def parse_request(self) -> bool:
            """Refuses what the service account of a Job may not do."""
            if not super().parse_request():
                return False
            if self.headers.get("authorization") == f"Bearer {cluster.jobs.token}":
                roles = [o for path, o in cluster.objects.items() if "/roles/" in path]
                rules = [rule for role in roles for rule in role["rules"]]
                if cluster.jobs.is_forbidden or not any(allows(rule, self.command, self.path) for rule in rules):
                    self.send_error(403, f"{self.command} {self.path}")
                    return False
            return True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            if url.path == "/openapi/v2":  # Encoded; of kinds without a schema helm checks nothing.
                return self._answer(200, None)
            found = _discovery(url.path) or cluster.objects.get(url.path)
            if found is None and url.path.endswith(("/jobs", "/pods")):  # helm watches hooks.
                if "watch" in query:
                    return self._answer(200, None)
                name = query["fieldSelector"][0].removeprefix("metadata.name=")
                items = [o for p, o in cluster.objects.items() if p == f"{url.path}/{name}"]
                version, kind = ("batch/v1", "JobList") if url.path.endswith("/jobs") else ("v1", "PodList")
                found = {"apiVersion": version, "kind": kind, "metadata": {"resourceVersion": "1"}, "items": items}
            if url.path.endswith("/log") and url.path.removesuffix("/log") in cluster.objects:
                return self._answer(200, {"ended": url.path.split("/")[-2]})
            if found is None and url.path.endswith("/secrets"):  # Where helm keeps its releases.
                items = cluster.listed(url.path, query.get("labelSelector", [""])[0])
                found = {"apiVersion": "v1", "kind": "SecretList", "metadata": {}, "items": items}
            self._answer(404 if found is None else 200, found)

        def do_POST(self) -> None:
            document = self._body()
            path = f"{urlsplit(self.path).path}/{document['metadata']['name']}"
            if path in cluster.objects:
                return self._refuse(409, f"{path} already exists", "AlreadyExists")
            cluster.objects[path] = document
            if document["kind"] == "Job":
                document["status"] = cluster.jobs.run(document, f"http://127.0.0.1:{server.server_port}")
            if document["kind"] == "Pod":  # Its script has tests of its own.
                document["status"] = {"phase": "Succeeded"}
            self._answer(201, document)

        def do_PUT(self) -> None:
            cluster.objects[urlsplit(self.path).path] = document = self._body()
            self._answer(200, document)

        def do_PATCH(self) -> None:
            path, patch = urlsplit(self.path).path, self._body()
            if "/".join(path.split("/")[-2:]) in cluster.refused:
                return self.send_error(500)
            if not _has(cluster.objects[path], patch):
                kind = cluster.objects[path]["kind"]
                if {key for key in patch.get("spec") or {} if key in FIXED.get(kind, ())}:
                    return self._refuse(422, f"{path}: spec is immutable", "Invalid")
                cluster.patches.append(("/".join(path.split("/")[-2:]), patch))
                cluster.objects[path] = _defaulted(_merged(cluster.objects[path], patch))
            self._answer(200, cluster.objects[path])

        def do_DELETE(self) -> None:
            gone = cluster.objects.pop(urlsplit(self.path).path, None)
            self._answer(404 if gone is None else 200, gone)

        def _body(self) -> Document:
            document: Document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return document

        def _refuse(self, status: int, message: str, reason: str) -> None:
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason}
            self._answer(status, {**body, "code": status})

        def _answer(self, status: int, document: Document | None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            if status != 200 or document is not None:
                self.wfile.write(json.dumps(document or missing).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: what helm says is enough."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        clusters = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
        contexts = [{"name": "c", "context": {"cluster": "c", "user": "c"}}]
        config = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "contexts": contexts}
        cluster.kubeconfig.write_text(yaml.safe_dump({**config, "users": [{"name": "c"}], "current-context": "c"}))
        yield cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _merged(document: Any, patch: Any) -> Any:
    """A strategic merge patch applied: null removes a field, items of lists by path or name."""
    if isinstance(document, dict) and isinstance(patch, dict):
        merged = {key: value for key, value in document.items() if key in patch.get("$retainKeys", document)}
        for key, value in patch.items():
            if key.startswith("$"):
                continue
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = _merged(document.get(key), value)
        return merged
    if isinstance(patch, list) and isinstance(document, list):
        both = [*document, *patch]
        keys = [key for key in ("mountPath", "name") if all(isinstance(each, dict) and key in each for each in both)]
        if document and keys:
            by_key = {each[keys[0]]: each for each in document}
            by_key |= {each[keys[0]]: _merged(by_key.get(each[keys[0]], {}), each) for each in patch}
            deleted = {each[keys[0]] for each in patch if each.get("$patch") == "delete"}
            return [each for key, each in by_key.items() if key not in deleted]
    return patch


def _defaulted(document: Document) -> Document:
    """Kubernetes assumes one pod where a Deployment names no number."""
    if document.get("kind") == "Deployment":
        document["spec"].setdefault("replicas", 1)
    return document


def _has(document: Any, patch: Any) -> bool:
    """Whether a patch says only what is so already."""
    if isinstance(document, dict) and isinstance(patch, dict):
        return all(key in document and _has(document[key], value) for key, value in patch.items())
    return bool(document == patch)


def _plural(kind: str) -> str:
    return f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"


def _discovery(path: str) -> Document | None:
    """What a server says of itself and of the kinds that it has."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": name, "version": name.partition("/")[2]} for name in KINDS if "/" in name]
        groups = [
            {"name": version["groupVersion"].partition("/")[0], "versions": [version], "preferredVersion": version}
            for version in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for api_version, kinds in KINDS.items():
        if path == (f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"):
            resources = [
                {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
                for kind in kinds
            ]
            return {"kind": "APIResourceList", "groupVersion": api_version, "resources": resources}
    return None
