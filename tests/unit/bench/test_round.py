"""How stamps of several processes become rounds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from google.protobuf.message import Message

import bench.round
from bench.round.stamps import DIRECT_STAGES, STAGES, read_stamps, rounds
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2

NUM_STAGES = len(STAGES)


def relayed(message: Message) -> tuple[bool, bytes]:
    """A message on a coordinator's stream."""
    return False, message.SerializeToString()


def linked(entry: pb.LinkEntry) -> tuple[bool, bytes]:
    """An entry on a direct link."""
    return True, pb.LinkFrame(entries=[entry]).SerializeToString()


def stamps_of_a_round(session: str, end: int, began_ns: int) -> list[tuple[str, int, object]]:
    """A verdict up to `end`, and each further stage a nanosecond later."""
    verdict = pb.Verdict(start_position=end - 2, token_ids=[7, 8])
    proposal = pb.Proposal(start_position=end, token_ids=[9]).SerializeToString()
    commit = draft_pb2.DraftEntry(session_id=session, commit=pb.Commit(start_position=end - 1, token_ids=[8]))
    bodies = [
        [(session, end)],
        relayed(target_pb2.VerifyResponse(results=[target_pb2.TargetResult(session_id=session, verdict=verdict)])),
        [(session, end)],
        relayed(draft_pb2.DraftRequest(entries=[commit])),
        [(session, end)],
        [(session, end)],
        relayed(draft_pb2.DraftResponse(results=[draft_pb2.DraftResult(session_id=session, proposal=proposal)])),
        (session, proposal),
        relayed(target_pb2.VerifyRequest(entries=[target_pb2.TargetEntry(session_id=session, proposal=proposal)])),
        [(session, end)],
    ]
    return [(stage, began_ns + index, body) for index, (stage, body) in enumerate(zip(STAGES, bodies, strict=True))]


def write(folder: Path, *processes: list[tuple[str, int, object]]) -> None:
    for number, stamps in enumerate(processes):
        (folder / f"{number}.stamps").write_bytes(pickle.dumps(stamps))


def test_a_round_is_joined_from_the_stamps_of_all_processes(tmp_path: Path) -> None:
    both = stamps_of_a_round("a", 20, 100) + stamps_of_a_round("b", 20, 200)
    write(tmp_path, both[::2], both[1::2])
    times, num_begun = rounds(read_stamps(tmp_path), [(0, 1000)], STAGES)
    assert num_begun == 2
    assert sorted(times) == [list(range(100, 100 + NUM_STAGES)), list(range(200, 200 + NUM_STAGES))]


def test_a_round_that_another_verdict_overtook_has_begun_but_has_no_times(tmp_path: Path) -> None:
    write(tmp_path, stamps_of_a_round("a", 20, 100), stamps_of_a_round("a", 22, 150)[:5])
    times, num_begun = rounds(read_stamps(tmp_path), [(0, 1000)], STAGES)
    assert num_begun == 2
    assert len(times) == 1


def test_a_round_on_a_direct_link_leads_from_engine_to_engine(tmp_path: Path) -> None:
    here = [("a", 20)]
    write(tmp_path, [(stage, 100 + number, here) for number, stage in enumerate(DIRECT_STAGES)])
    times, num_begun = rounds(read_stamps(tmp_path), [(0, 1000)], DIRECT_STAGES)
    assert (times, num_begun) == ([[100, 101, 102, 103]], 1)


def test_frames_of_a_link_are_read_as_such(tmp_path: Path) -> None:
    commit = linked(pb.LinkEntry(session_id="a", commit=pb.Commit(start_position=18, token_ids=[7, 8])))
    proposal = pb.Proposal(start_position=20, token_ids=[9]).SerializeToString()
    answer = linked(pb.LinkEntry(session_id="a", proposal=proposal))
    write(tmp_path, [("draft servicer has request", 5, commit), ("target servicer has request", 6, answer)])
    reached = read_stamps(tmp_path)
    assert reached["draft servicer has request"] == {("a", 20): 5}
    assert reached["target servicer has request"] == {("a", 20): 6}


def test_only_rounds_of_the_wanted_time_count(tmp_path: Path) -> None:
    write(tmp_path, stamps_of_a_round("a", 20, 100), stamps_of_a_round("a", 22, 150))
    assert rounds(read_stamps(tmp_path), [(120, 1000)], STAGES) == ([list(range(150, 150 + NUM_STAGES))], 1)


def test_every_method_that_the_probe_stamps_is_there(tmp_path: Path) -> None:
    """A service under the probe would not start otherwise."""
    probe = Path(bench.round.__file__).parent / "probe"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(probe), *sys.path])}
    environment["SPECDEC_ROUND_FOLDER"] = str(tmp_path)
    loads_all = (
        "import importlib, sitecustomize\n"
        "for name in sitecustomize._PATCHES: importlib.import_module(name)\n"
        "from specdec.target_service.pacing.pacing import Pacing\n"
        "print(hasattr(Pacing.observe_proposal, '__wrapped__'))"
    )
    command = [sys.executable, "-c", loads_all]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "True\n", done.stderr
