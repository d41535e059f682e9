"""Typed clients of the coordinator, for asyncio and without, and streams that outlive one."""

from specdec.client.client import Client, ClientSettings, CompletedChoice, Completion
from specdec.client.resuming import ResumePolicy, generate_resuming, resumed_request
from specdec.client.sync import ChunkStream, SyncClient

__all__ = [
    "ChunkStream",
    "Client",
    "ClientSettings",
    "CompletedChoice",
    "Completion",
    "ResumePolicy",
    "SyncClient",
    "generate_resuming",
    "resumed_request",
]
