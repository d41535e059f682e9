"""Processor time of a target's engine between two passes, by sessions, plain and speculating.

    python -m bench.host                         # 1, 8 and 64 sessions
    python -m bench.host --sessions 8 --profile  # where the time goes

The worker, its role, frames and socket are the product's; the pass is played, and its time is left out. *Gap* is the
time from collecting a pass to launching the next one, in which a GPU waits; *turn* is all time of a step, which is what
a CPU waits for. Both are processor time of the engine's thread per step, the median of rounds; the looks at that clock,
each a system call of 0.2 to 100 us, are measured and left out.

A Python that was built without optimizations, pyenv's default, took 9 to 25 percent longer than Debian's.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from prometheus_client import CollectorRegistry

from specdec.config import TargetSettings
from specdec.engine.batch import Batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.runner import ResultT
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.scheduler import Scheduler
from specdec.replica.bridge.frame_codec import Frame, FrameDecoder, FrameKind, encode_frame
from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.entry import COLLECT_EVERY
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.loop import EngineWorker
from specdec.replica.worker.role import Wire
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.session import TargetSession
from specdec.target_service.verifier import Verifier
from specdec.telemetry import TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2

_VOCAB, _BLOCK, _MAX_LEN = 512, 16, 4096
_PROMPT = list(range(20))
_MAIN, _SIBLINGS = 6, 2
"""Nodes of a proposal's main path, and other nodes beside its first ones."""
_STREAM = 1
_WARM_UP, _ROUNDS, _STEPS, _LOOKS = 30, 7, 20, 200
_WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse)


def look_s() -> float:
    """Seconds of one look at the thread's processor time: the median of many."""
    looks = [time.thread_time() for _ in range(_LOOKS)]
    return statistics.median(after - before for before, after in pairwise(looks))


def token_at(position: int) -> int:
    """The token that every session commits at a position."""
    return (position * 7919 + 13) % _VOCAB


@dataclass(slots=True)
class Meter:
    """Processor seconds of the engine's thread."""

    gap_s: float = 0.0
    turn_s: float = 0.0
    passes_s: float = 0.0
    num_steps: int = 0
    look_s: float = field(default_factory=look_s)
    collected_at_s: float | None = None
    """Time of the last collection, moved by what is no part of the gap; None: a pass is under way."""


class PlayedPass:
    """A pass that is done when the worker has read all frames."""

    def __init__(self, logits: torch.Tensor, port: PlayedPort, meter: Meter) -> None:
        self._logits, self._port, self._meter = logits, port, meter
        port.is_drained = False

    def is_done(self) -> bool:
        """See `LaunchedPass`."""
        return self._port.is_drained

    def logits(self) -> torch.Tensor:
        """See `LaunchedPass`."""
        self._meter.collected_at_s = time.thread_time() + self._meter.look_s
        return self._logits

    def behind(self, work: Callable[[torch.Tensor], ResultT]) -> Callable[[], ResultT]:
        """See `LaunchedPass`; the work is a part of the turn and not of the gap."""
        found = work(self._logits)
        return lambda: found

    def gap_s(self) -> float | None:
        """See `LaunchedPass`."""
        return None


class PlayedPort(EnginePort):
    """A port that knows whether its last look found nothing."""

    is_drained = False

    def poll(self, timeout_s: float | None) -> list[Frame]:
        """See `EnginePort`."""
        frames = super().poll(0)
        self.is_drained = not frames
        return frames


class PlayedModel:
    """`Runner` whose logits leave one token likely: `token_at` of the next position."""

    def __init__(self, meter: Meter) -> None:
        self.device = torch.device("cpu")
        self.port: PlayedPort
        self._meter = meter
        self._rows = torch.full((_MAX_LEN + 1, _VOCAB), -1e3)
        self._rows[torch.arange(_MAX_LEN + 1), [token_at(place + 1) for place in range(_MAX_LEN + 1)]] = 1e3

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Runner`."""
        return self._rows[batch.position_ids[batch.logits_indices]]

    def launch(self, batch: Batch) -> PlayedPass:
        """A pass that is computed here, off the clock."""
        meter, began_s = self._meter, time.thread_time()
        if meter.collected_at_s is not None:
            meter.gap_s += began_s - meter.collected_at_s
            meter.num_steps += 1
        meter.collected_at_s = None
        found = PlayedPass(self.forward(batch), self.port, meter)
        meter.passes_s += time.thread_time() - began_s + 2 * meter.look_s
        return found

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """There is no cache."""

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """There is no cache."""


class FixedTimes(StepTimeModel):
    """Rows cost next to nothing, so that every proposed node is verified."""

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """Learn nothing."""


@dataclass(slots=True)
class _Choice:
    """A session as its coordinator and draft know it."""

    num_tokens: int
    num_seen: int = 0


@dataclass
class Played:
    """A target with its client and draft, which are off the clock."""

    num_sessions: int
    is_speculating: bool
    meter: Meter = field(default_factory=Meter)
    choices: dict[str, _Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = PlayedModel(self.meter)
        ours, theirs = socket.socketpair()
        model.port = PlayedPort(ours)
        self._peer, self._decoder, self._left_s = theirs, FrameDecoder(), 0.0
        theirs.setblocking(False)
        pool = BlockPool(self.num_sessions * _MAX_LEN // _BLOCK, _BLOCK)
        engine = Engine(model, pool, Scheduler(pool, 4096, 256, _MAX_LEN), model.launch)
        identity = pb.ModelIdentity(vocab_size=_VOCAB, max_model_len=_MAX_LEN, device="cpu", dtype="float32")
        built = BuiltEngine(engine, Sampler(_VOCAB, "cpu"), pb.GetReplicaInfoResponse(identity=identity))
        settings = TargetSettings(model="played", adaptive_speculation=False, max_sessions=256)
        host = SessionHost[TargetSession](model.port, _WIRE, identity, session_ttl_s=600.0)
        role = Verifier(host, built, settings, TargetRecorder(TargetMetrics(CollectorRegistry())))
        role.steps.pacing.clock.rows = FixedTimes(base_s=1.0, row_s=1e-9)
        self._worker = EngineWorker(model.port, _WIRE, built.info, host, role)
        self._send(target_pb2.VerifyRequest(attach=pb.Attach(owner_id="bench")))
        sampling = pb.TokenSampling(
            temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=_MAX_LEN, ignore_eos=True, seed=3
        )
        for number in range(self.num_sessions):
            body = pb.OpenSession(
                token_ids=[number, *_PROMPT],
                num_prompt_tokens=len(_PROMPT) + 1,
                sampling=sampling,
                speculate=self.is_speculating,
                credit_position=_MAX_LEN,
            )
            name = f"session-{number}"
            self.choices[name] = _Choice(len(_PROMPT) + 1)
            self._send(target_pb2.VerifyRequest(entries=[target_pb2.TargetEntry(session_id=name, epoch=1, open=body)]))

    def turns(self, num_turns: int, profile: cProfile.Profile | None = None) -> None:
        """Run turns of the worker; between them its peers answer."""
        meter = self.meter
        for _ in range(num_turns):
            began_s = time.thread_time()
            if meter.collected_at_s is not None:
                meter.collected_at_s += began_s - self._left_s + meter.look_s
            if profile is not None:
                profile.enable()
            self._worker._turn()
            if profile is not None:
                profile.disable()
            self._left_s = time.thread_time()
            meter.turn_s += self._left_s - began_s - meter.look_s
            self._answer()

    def _answer(self) -> None:
        entries = []
        for result in self._results():
            choice = self.choices[result.session_id]
            if result.WhichOneof("result") != "verdict":
                continue
            choice.num_tokens += len(result.verdict.token_ids)
            if self.is_speculating:
                entry = target_pb2.TargetEntry(session_id=result.session_id, epoch=1)
                entry.proposal = _proposal(choice).SerializeToString()
                entries.append(entry)
        for entry in entries:  # drafts send apart from each other
            self._send(target_pb2.VerifyRequest(entries=[entry]))

    def _results(self) -> list[target_pb2.TargetResult]:
        found: list[target_pb2.TargetResult] = []
        while True:
            try:
                data = self._peer.recv(1 << 20)
            except BlockingIOError:
                return found
            for frame in self._decoder.feed(data):
                if frame.kind is FrameKind.MESSAGE:
                    found += target_pb2.VerifyResponse.FromString(frame.payload).results

    def _send(self, message: target_pb2.VerifyRequest) -> None:
        for part in encode_frame(FrameKind.MESSAGE, _STREAM, message.SerializeToString()):
            self._peer.sendall(part)


def _proposal(choice: _Choice) -> pb.Proposal:
    """A tree that is right for one to six tokens, by turns."""
    choice.num_seen += 1
    start, num_right = choice.num_tokens, 1 + choice.num_seen % _MAIN
    main = [token_at(start + depth) for depth in range(_MAIN)]
    main = [token if depth < num_right else (token + 1) % _VOCAB for depth, token in enumerate(main)]
    beside = [(token + 2) % _VOCAB for token in main[:_SIBLINGS]]
    return pb.Proposal(
        start_position=start,
        token_ids=[*main, *beside],
        parents=[*range(-1, _MAIN - 1), *range(-1, _SIBLINGS - 1)],
        scores=bytes([250, 240, 230, 220, 210, 200, 90, 80]),
        path_length=_MAIN,
        draft_us=1000,
        is_complete=True,
    )


def measure(num_sessions: int, *, is_speculating: bool, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Median milliseconds of the gap and of the turn, and committed tokens per step and session."""
    played = Played(num_sessions, is_speculating)
    played.turns(_WARM_UP)
    gc.collect()
    gc.freeze()  # as an engine process before its first session
    gc.set_threshold(COLLECT_EVERY)
    gaps, turns, meter = [], [], played.meter
    before = sum(choice.num_tokens for choice in played.choices.values())
    for _ in range(_ROUNDS):
        meter.gap_s = meter.turn_s = meter.passes_s = 0.0
        meter.num_steps = 0
        played.turns(_STEPS, profile)
        gaps.append(meter.gap_s / max(1, meter.num_steps))
        turns.append((meter.turn_s - meter.passes_s) / max(1, meter.num_steps))
    committed = sum(choice.num_tokens for choice in played.choices.values()) - before
    return {
        "gap": statistics.median(gaps) * 1e3,
        "turn": statistics.median(turns) * 1e3,
        "tokens": committed / (_ROUNDS * _STEPS * num_sessions),
    }


def main() -> None:
    """Print a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1,8,64")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for is_speculating in (False, True):
        for number in map(int, options.sessions.split(",")):
            profile = cProfile.Profile() if options.profile else None
            found = measure(number, is_speculating=is_speculating, profile=profile)
            kind = "speculating" if is_speculating else "plain"
            figures = f"gap {found['gap']:.3f} ms, turn {found['turn']:.3f} ms, {found['tokens']:.2f} tokens a step"
            print(f"{number} {kind}: {figures}")
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
