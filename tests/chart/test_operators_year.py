"""A year of a release: installed, upgraded, broken off, rolled back, scaled, given another model, deleted."""

from __future__ import annotations

from pathlib import Path

from tests.chart.api_server import Cluster, api_server
from tests.chart.rendered import CHART, Document, Helm

RELEASE = "demo-specdec"
VALUES: Document = {
    "redis": {"mode": "bundled"},
    "coordinator": {"replicas": 2},
    "gateway": {"autoscaling": {"enabled": True}},
    "target": {
        "model": {"source": "hf://org/small@v1", "fetch": {"enabled": True, "beforeUpgrade": True}},
        "cache": {"type": "claim", "sizeLimit": "40Gi", "accessModes": ["ReadWriteMany"]},
    },
    "upgradeCheck": {"enabled": True},
}


class Operator:
    """Runs helm against a cluster, with the flags that are the same each time."""

    def __init__(self, helm: Helm, cluster: Cluster) -> None:
        self._helm = helm
        self.cluster = cluster

    def does(self, action: str, *flags: str, values: Document | None = None, fails: bool = False) -> str:
        """What helm says; the Jobs and patches of this action only are kept."""
        self.cluster.patches.clear()
        self.cluster.jobs.ran.clear()
        chart = [str(CHART)] if action in ("install", "upgrade") else []
        where = ["--namespace", "llm", "--kubeconfig", str(self.cluster.kubeconfig)]
        done = self._helm(action, "demo", *chart, *flags, *where, values=values)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr

    def jobs(self) -> list[str]:
        """The Jobs that the last action ran, without the release's name."""
        return [name.removeprefix(f"{RELEASE}-") for name, _ in self.cluster.jobs.ran]

    def changed(self) -> set[str]:
        """What the last action patched, without the release's name."""
        return {name.replace(f"{RELEASE}-", "") for name, _ in self.cluster.patches}

    def existing(self) -> set[str]:
        """All objects but helm's own records."""
        return set(self.cluster.workload)

    def deployment(self, role: str) -> Document:
        found: Document = self.cluster.named("Deployment", f"{RELEASE}-{role}")["spec"]
        return found

    def flags(self, role: str) -> list[str]:
        """The flags of a role's service."""
        flags: list[str] = self.deployment(role)["template"]["spec"]["containers"][0]["args"]
        return flags

    def secrets(self) -> Document:
        data: Document = self.cluster.named("Secret", f"{RELEASE}-generated")["data"]
        return dict(data)


def test_a_release_lives_through_a_year(helm: Helm, tmp_path: Path) -> None:
    with api_server(tmp_path) as cluster:
        operator = Operator(helm, cluster)

        operator.does("install", values=VALUES)
        assert operator.jobs() == ["secrets"], "nothing runs yet that a doctor could ask"
        installed, made = operator.existing(), operator.secrets()
        assert f"persistentvolumeclaims/{RELEASE}-target-cache" in installed
        assert "--revision=v1" in operator.flags("target")
        cluster.named("Deployment", f"{RELEASE}-gateway")["spec"]["replicas"] = 7  # What an autoscaler does.

        # A setting of one role, with the values of the release.
        operator.does("upgrade", "--reuse-values", values={"coordinator": {"settings": {"max_running": 99}}})
        assert operator.jobs() == ["secrets", "target-fetch", "doctor"]
        assert operator.changed() == {"deployments/coordinator"}
        assert "--max-running=99" in operator.flags("coordinator") and "--revision=v1" in operator.flags("target")
        assert operator.secrets() == made

        # The check of the running release fails: nothing is replaced.
        cluster.jobs.failing = {f"{RELEASE}-doctor"}
        before = {name: operator.flags(name) for name in ("coordinator", "target")}
        operator.does("upgrade", "--reuse-values", values={"target": {"settings": {"max_batch_seqs": 3}}}, fails=True)
        assert operator.jobs()[-1] == "doctor" and operator.changed() == set()
        assert {name: operator.flags(name) for name in before} == before
        assert f"jobs/{RELEASE}-doctor" in operator.existing(), "kept for its log"
        cluster.jobs.failing = set()

        # An upgrade that breaks off half way, and back.
        cluster.refused = {f"deployments/{RELEASE}-target"}
        operator.does("upgrade", "--reuse-values", values={
            "target": {"settings": {"max_batch_seqs": 3}}, "coordinator": {"settings": {"max_running": 5}},
        }, fails=True)  # fmt: skip
        cluster.refused = set()
        assert "--max-running=5" in operator.flags("coordinator") and "--max-batch-seqs=3" not in operator.flags(
            "target"
        )
        operator.does("rollback", "2")
        assert {name: operator.flags(name) for name in before} == before
        assert operator.deployment("gateway")["replicas"] == 7
        assert operator.jobs() == ["secrets"] and operator.secrets() == made

        # More targets, and then the autoscaler's number of gateways is still its own.
        operator.does("upgrade", "--reuse-values", values={"target": {"replicas": 3}})
        assert operator.changed() == {"deployments/target"}
        assert (operator.deployment("target")["replicas"], operator.deployment("gateway")["replicas"]) == (3, 7)

        # Another model: it is downloaded while the old one serves.
        operator.does("upgrade", "--reuse-values", values={"target": {"model": {"source": "hf://org/small@v2"}}})
        ((_, fetched),) = [job for job in cluster.jobs.ran if job[0].endswith("-fetch")]
        assert fetched[:4] == ["specdec", "fetch", "org/small", "--revision=v2"]
        assert operator.changed() == {"deployments/target"} and "--revision=v2" in operator.flags("target")

        # Other secrets: the generated password is replaced by one that is given, the key of resume tokens by a new one.
        del cluster.named("Secret", f"{RELEASE}-generated")["data"]["resume-secret"]
        given = {"redis": {"bundled": {"existingSecret": "mine"}}}
        operator.does("upgrade", "--reuse-values", values=given)
        assert operator.secrets()["resume-secret"] not in (None, made["resume-secret"])
        users = {f"deployments/{role}" for role in ("coordinator", "target", "draft", "redis")}
        assert operator.changed() == users | {"secrets/generated"}

        operator.does("uninstall")
        kept = {f"secrets/{RELEASE}-generated", f"persistentvolumeclaims/{RELEASE}-target-cache"}
        assert operator.existing() == kept

        # A release of the same name takes up what was kept.
        kept_secrets = operator.secrets()
        operator.does("install", values=VALUES)
        assert operator.secrets() == kept_secrets
        assert operator.existing() == installed
