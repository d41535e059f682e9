"""A typed client of the coordinator, and streams that outlive one."""

from specdec.client.chat import chat_messages
from specdec.client.client import Client, ClientSettings, CompletedChoice, Completion
from specdec.client.resuming import Generates, ResumePolicy, generate_resuming, resumed_request

__all__ = [
    "Client",
    "ClientSettings",
    "CompletedChoice",
    "Completion",
    "Generates",
    "ResumePolicy",
    "chat_messages",
    "generate_resuming",
    "resumed_request",
]
