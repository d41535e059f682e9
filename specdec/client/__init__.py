"""A typed client of the coordinator, and streams that outlive one."""

from specdec.client.client import Client, ClientSettings, CompletedChoice, Completion
from specdec.client.resuming import Generates, ResumePolicy, generate_resuming, resumed_request

__all__ = [
    "Client",
    "ClientSettings",
    "CompletedChoice",
    "Completion",
    "Generates",
    "ResumePolicy",
    "generate_resuming",
    "resumed_request",
]
