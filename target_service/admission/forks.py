"""Sessions that wait for the prompt of another one, whose KV they then share."""

from __future__ import annotations

from specdec.target_service.session import SessionState, TargetSession


class Forks:
    """Sessions in state FORKING, by the id of the session whose prompt they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[TargetSession]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, session: TargetSession) -> None:
        """The session waits from now on."""
        self._waiting.setdefault(session.body.fork_from, []).append(session)

    def take(self, parent_id: str) -> list[TargetSession]:
        """Those that wait for a prompt wait no longer: it is computed, or will not be."""
        return self._waiting.pop(parent_id, [])

    def drop(self, session: TargetSession) -> None:
        """The session has ended while it waited; nothing happens if it did not wait."""
        if session in (waiting := self._waiting.get(session.body.fork_from, [])):
            waiting.remove(session)


def may_fork(session: TargetSession, parent: TargetSession | None) -> bool:
    """Whether `parent` is about to compute the very prompt of `session`, so that it may wait and share the KV."""
    return (
        parent is not None
        and parent.owner is session.owner
        and parent.state is SessionState.PREFILL
        and len(parent.body.token_ids) == parent.body.num_prompt_tokens
        and session.body.token_ids == parent.body.token_ids
        and session.body.cache_salt == parent.body.cache_salt
        and not session.body.HasField("num_prompt_logprobs")
        and not (session.body.apart_until or parent.body.apart_until)  # a fork's first token is of its parent's step
    )
