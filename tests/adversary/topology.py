"""Who is in the fleet, and which links join them."""

from __future__ import annotations

from dataclasses import dataclass, replace

ROLES = ("target", "draft", "coordinator")
REDIS = "redis"
PATHS = {
    "network": "proposals go from draft to target over gRPC, and by way of coordinators when a link fails",
    "host": "the same, by Unix sockets between engines",
    "relayed": "all proposals go by way of coordinators",
}
"""Ways of proposals, each with its description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Numbers of services and clients. Services are named ROLE-NUMBER, links SOURCE>DESTINATION."""

    num_targets: int = 2
    num_drafts: int = 2
    num_coordinators: int = 2
    num_gateways: int = 0
    num_clients: int = 16
    num_http_clients: int = 0
    """Clients of the gateways."""
    path: str = "network"
    """One of `PATHS`."""
    num_processes: int = 1
    """Processes of the first coordinator."""
    has_hosts: bool = False
    """Each service has a host with the memory limit and the disk that Compose gives it."""
    has_sentinel: bool = False
    """Redis is a primary with a replica, which a sentinel promotes; services ask the sentinel where it is."""
    has_clock: bool = False
    """The clock of Redis can jump."""

    def of(self, role: str) -> list[str]:
        """The services of a role."""
        count = {"target": self.num_targets, "draft": self.num_drafts, "coordinator": self.num_coordinators}
        count |= {"gateway": self.num_gateways}
        return [f"{role}-{number}" for number in range(count[role])]

    @property
    def services(self) -> list[str]:
        """All services, replicas first and gateways last."""
        return [name for role in (*ROLES, "gateway") for name in self.of(role)]

    @property
    def users_of_redis(self) -> list[str]:
        """All services but gateways."""
        return [name for role in ROLES for name in self.of(role)]

    @property
    def clients(self) -> list[str]:
        """All clients."""
        return [f"client-{number}" for number in range(self.num_clients)]

    @property
    def http_clients(self) -> list[str]:
        """All clients of gateways."""
        return [f"http-{number}" for number in range(self.num_http_clients)]

    @property
    def links(self) -> list[str]:
        """All links."""
        replicas = [*self.of("target"), *self.of("draft")]
        return [
            *(f"{client}>{coordinator}" for client in self.clients for coordinator in self.of("coordinator")),
            *(f"{gateway}>{coordinator}" for gateway in self.of("gateway") for coordinator in self.of("coordinator")),
            *(f"{coordinator}>{replica}" for coordinator in self.of("coordinator") for replica in replicas),
            *self.direct_links,
            *([] if self.has_sentinel else [f"{service}>{REDIS}" for service in self.users_of_redis]),
        ]

    @property
    def direct_links(self) -> list[str]:
        """Links between drafts and targets."""
        drafts = [] if self.path == "relayed" else self.of("draft")
        return [f"{draft}>{target}" for draft in drafts for target in self.of("target")]


def short_runs(num_clients: int, *, has_hosts: bool, has_clock: bool) -> dict[str, Topology]:
    """Fleets of the short runs, by name: every kind of fault that there is befalls one of them."""
    runs = {path: Topology(num_clients=num_clients, path=path) for path in PATHS}
    runs["network"] = replace(
        runs["network"],
        num_gateways=2,
        num_http_clients=num_clients // 2,
        num_processes=2,
        has_hosts=has_hosts,
        has_clock=has_clock,
    )
    runs["sentinel"] = replace(runs["relayed"], has_sentinel=True)
    return runs


def role_of(name: str) -> str:
    """The role in a service's name: target-1 is a target."""
    return name.partition("-")[0]
