"""Settings of a target whose ranks are on several machines."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator

from specdec.service.exposure import ExposureSettings


class NodeSettings(ExposureSettings):
    """Which node of a group of machines a process is, and where the group's leader is. TLS is the service's own."""

    nnodes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Machines that share the ranks, equally many each; every one runs the same command. Above 1 an "
        "engine that ends is not restarted: all nodes exit with 1, and their supervisor starts them again.",
    )
    node_rank: int = Field(
        default=0, ge=0, le=63, description="Number of this machine; 0 leads and is the one that is called."
    )
    master_addr: str | None = Field(
        default=None, min_length=1, max_length=253, description="Name or address of the leader; the others need it."
    )
    master_port: int = Field(
        default=29501,
        ge=0,
        le=65535,
        description="Port at which the leader waits for the other nodes, with the certificate of tls_dir; collectives "
        "use free ports of all nodes.",
    )
    node_timeout_s: float = Field(
        default=20.0, ge=1, le=3600, description="Seconds without a sign of life of another node until a node gives up."
    )

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}")
        if self.nnodes == 1:
            return self
        if self.node_rank and self.master_addr is None:
            raise ValueError(f"master_addr is needed: node_rank is {self.node_rank}")
        if self.serves_tls and not self.verifies_clients:
            raise ValueError("nnodes above 1 needs tls_verify_clients: nodes prove to each other who they are")
        if not self.trusts_network:
            raise ValueError(
                "nnodes above 1 needs tls_dir with tls_verify_clients, or allow_unauthenticated behind network "
                "policies: whoever reaches master_port could join"
            )
        return self


def nodes_of(settings: BaseModel) -> NodeSettings:
    """The node settings of a service; the defaults, one node, for a service without them."""
    return NodeSettings.model_validate(settings.model_dump(include=set(NodeSettings.model_fields)))
