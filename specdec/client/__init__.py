"""Typed clients of the coordinator, with and without asyncio, and streams that survive a coordinator's end."""

from specdec.client.chat import chat_messages
from specdec.client.client import Client
from specdec.client.completion import CompletedChoice, Completion
from specdec.client.resuming import Generates, ResumePolicy, generate_resuming, resumed_request
from specdec.client.settings import ClientSettings
from specdec.client.sync import ChunkStream, SyncClient

__all__ = [
    "ChunkStream",
    "Client",
    "ClientSettings",
    "CompletedChoice",
    "Completion",
    "Generates",
    "ResumePolicy",
    "SyncClient",
    "chat_messages",
    "generate_resuming",
    "resumed_request",
]
