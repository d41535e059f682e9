"""What all requests of a chat begin with: it chooses the coordinator, which knows the targets that cache the chat."""

from __future__ import annotations

import itertools

from specdec.v1 import coordinator_pb2 as api
from specdec.wire.rendezvous import word

_MOST_MESSAGES = 8
"""Messages that count, at most, up to the first one of a user."""
_MOST_CHARACTERS = 1024
"""Characters of a prompt, and of a message, that count: questions about one document share its cache."""
_MOST_TOKENS = 256
"""Ids of a prompt of ids that count."""
_OF_TENANTS = ("authorization", "specdec-tenant")
"""Metadata by which coordinators know a tenant; tenants share no cache."""
_END = "\0"


def key_of(request: api.GenerateRequest, metadata: tuple[tuple[str, str], ...]) -> int:
    """A key that all requests of a chat have: by its caller, its salt, and its messages up to the first question.

    An instruction that many chats share does not bring them together, since their questions differ. Of a prompt
    without messages the first characters or ids count.
    """
    parts = [request.cache_salt, *(value for name, value in metadata if name in _OF_TENANTS)]
    match request.WhichOneof("input"):
        case "messages":
            for message in itertools.islice(request.messages.messages, _MOST_MESSAGES):
                texts = (message.content, message.fields_json)
                parts += [message.role, *(text[:_MOST_CHARACTERS] for text in texts)]
                if message.role == "user":
                    break
        case "prompt_token_ids":
            parts.append(repr(request.prompt_token_ids.token_ids[:_MOST_TOKENS]))
        case _:
            parts.append(request.prompt[:_MOST_CHARACTERS])
    return word(_END.join(parts).encode(errors="surrogatepass"))
