"""A slot on a GPU: it stops in time, goes on where it stopped, and loses nothing to a step that fails."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_slot import running, steps
from bench.gpu_slot.__main__ import LIMIT_S, STEPS, State, archive, distributions, found_so_far, run_slot, told, unpack
from bench.gpu_slot.models import StepSetup
from bench.gpu_slot.running import Written, end_left_behind, run_process
from bench.gpu_slot.wheels import (
    ARCHIVE,
    EXPECTED,
    check_size,
    checkout_bytes,
    installed,
    known,
    pack,
    wanted,
)
from bench.report import versions

ROOT = Path(__file__).resolve().parents[3]
DRY = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}


class Slot:
    """Steps that take as long as they are said to, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.now_s, self.seconds, self.saved = 100.0, seconds, [""]
        self.ran: list[tuple[str, float]] = []
        monkeypatch.setattr("bench.gpu_slot.__main__.time.monotonic", lambda: self.now_s)

    def run(self, name: str, timeout_s: float, tell: Callable[[Written], None]) -> dict[str, Any]:
        self.ran.append((name, timeout_s))
        self.now_s += min(self.seconds[name], timeout_s)
        return {"status": "ok" if self.seconds[name] <= timeout_s else "timeout"}

    def save(self, state: State) -> None:
        self.saved.append(json.dumps(state))


def test_a_second_slot_goes_on_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, versions=5, exactness=60, attention=50)
    names = ["versions", "exactness", "attention"]
    state = run_slot({}, names, slot.run, slot.save, 70)
    assert slot.ran == [("versions", 60), ("exactness", 60)]  # 5 s are left, in which nothing is begun
    assert "attention" not in state
    run_slot(json.loads(slot.saved[-1]), names, slot.run, slot.save, 570)
    assert slot.ran[2:] == [("attention", 120)]
    assert json.loads(slot.saved[-1])["attention"] == {"status": "ok", "seconds": 50}


def test_a_step_that_hangs_costs_its_own_time_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, versions=1000, exactness=1)
    state = run_slot({}, ["versions", "exactness"], slot.run, slot.save, 570)
    assert [state[name]["status"] for name in state] == ["timeout", "ok"]
    run_slot(state, ["versions", "exactness"], slot.run, slot.save, 570)
    assert [name for name, _ in slot.ran] == ["versions", "exactness", "versions"]


def test_a_slot_stops_by_itself_at_nine_and_a_half_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT_S == 9.5 * 60
    slot = Slot(monkeypatch, **dict.fromkeys(STEPS, 1e9))
    run_slot({}, list(STEPS), slot.run, slot.save, LIMIT_S)
    assert slot.now_s - 100.0 <= LIMIT_S


def test_what_was_running_when_the_machine_was_taken_away_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, versions=1)

    def taken_away(name: str, timeout_s: float, tell: Callable[[Written], None]) -> dict[str, Any]:
        tell({"gpu": "H", "found": {"a": 1}})
        raise SystemExit

    with pytest.raises(SystemExit):
        run_slot({}, ["versions"], taken_away, slot.save, 570)
    assert json.loads(slot.saved[1]) == {"versions": {"status": "running"}}
    assert json.loads(slot.saved[-1]) == {"versions": {"status": "running", "gpu": "H", "found": {"a": 1}}}


def test_what_a_step_found_before_is_kept_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, steps=1000)
    before = {"gpu": "H", "found": {"a": 1}}
    state = run_slot({"steps": {"status": "timeout", **before}}, ["steps"], slot.run, slot.save, 570)
    assert state["steps"] == {"status": "timeout", "seconds": 90, "earlier": before}
    slot.seconds["steps"] = 1
    state = run_slot(state, ["steps"], slot.run, slot.save, 570)
    assert state["steps"] == {"status": "ok", "seconds": 1}


def test_a_step_that_cannot_be_done_in_the_time_left_is_left_and_a_short_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = Slot(monkeypatch, large=1, draft=1)
    state = run_slot({}, ["large", "draft"], slot.run, slot.save, 100)
    assert list(state) == ["draft"]


def test_a_step_runs_without_a_gpu_and_says_what_it_found() -> None:
    result = run_process("exactness", 200, True, DRY)
    assert result["status"] == "ok", result
    differing = dict.fromkeys((f"{what}_that_differ" for what in ("tokens", "scores", "cuts", "adjusted")), 0)
    assert result["found"] == {"tokens": 12} | differing
    assert result["gpu"] is None


def test_a_step_that_fails_says_why() -> None:
    result = run_process("versions", 100, False, {**DRY, "CUDA_VISIBLE_DEVICES": "-1"})
    assert result["status"] == "failed"
    assert "no CUDA device is here" in result["output"]


def test_a_machine_without_a_compiler_and_a_home_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    found = steps.versions(StepSetup(torch.device("cpu"), dry=True))
    assert found["compiler"] is None
    assert str(tmp_path / "nowhere") not in found["free GiB"]


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_every_step_runs_without_a_gpu(name: str) -> None:
    result = run_process(name, 900, True, DRY)
    assert result["status"] == "ok", result
    assert result["found"]


def test_wheels_are_what_the_machine_lacks_and_nothing_that_cuda_brings() -> None:
    everything = wanted({})
    assert {"grpcio", "protobuf", "transformers", "pydantic", "tokenizers"} <= set(everything)
    assert not [name for name in everything if name.startswith(("torch", "triton", "nvidia"))]
    has = {"numpy": everything["numpy"], "transformers": "5.17.0", "redis": everything["redis"]}
    assert not {"redis", "transformers"} & set(wanted(has))
    too_old = wanted({**has, "transformers": "5.16.4"})
    assert too_old["transformers"] == everything["transformers"]


def test_what_a_machine_has_is_taken_from_a_slots_results_or_from_pip(tmp_path: Path) -> None:
    listed = distributions()
    (tmp_path / "pip.json").write_text(json.dumps(listed))
    (tmp_path / "slot.json").write_text(json.dumps({"machine": {"found": {"distributions": listed}}}))
    found = installed(tmp_path / "slot.json")
    assert found == installed(tmp_path / "pip.json")
    assert "numpy" in found
    assert not wanted(found, "3.11")  # this machine lacks nothing


def test_what_a_machine_has_is_what_the_last_slot_found_or_what_is_expected(tmp_path: Path) -> None:
    earlier, own = tmp_path / "slot.json", tmp_path / "pip.json"
    assert known(None, earlier) == EXPECTED
    assert {"grpcio", "protobuf", "pydantic"} < set(wanted(EXPECTED))
    assert not {"transformers", "tokenizers", "numpy"} & set(wanted(EXPECTED))
    machine = {"found": {"distributions": [{"name": "NumPy", "version": "1"}]}}
    earlier.write_text(json.dumps({"machine": {**machine, "dry": True}}))
    assert known(None, earlier) == EXPECTED
    earlier.write_text(json.dumps({"machine": {**machine, "dry": False}}))
    assert known(None, earlier) == {"numpy": "1"}
    own.write_text("[]")
    assert known(own, earlier) == {}


def test_steps_before_those_that_serve_need_no_packages_of_services() -> None:
    code = "import sys, bench.gpu_slot.steps; sys.exit('grpc' in sys.modules or 'prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=DRY, check=True)


def test_wheels_that_are_too_large_beside_the_checkout_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    with archive.open("wb") as file:
        file.truncate(16 << 20)
    assert check_size(archive, 28 << 20) == 16 << 20
    with pytest.raises(ValueError, match=r"^16\.0 MiB of wheels beside a checkout of 29\.0, and 44 may be carried"):
        check_size(archive, 29 << 20)
    assert 16 << 20 < checkout_bytes() < 44 << 20


@pytest.mark.parametrize("is_packed", [False, True])
def test_carried_wheels_are_found_before_what_is_installed(tmp_path: Path, is_packed: bool) -> None:
    with zipfile.ZipFile(tmp_path / "one-1-py3-none-any.whl", "w") as archive:
        archive.writestr("one/__init__.py", "NAME = 'one'")
    wheels = tmp_path
    if is_packed:
        wheels = tmp_path / ARCHIVE
        pack(tmp_path, wheels)
    unpack(wheels, tmp_path / "site")
    assert (tmp_path / "site" / "one" / "__init__.py").read_text() == "NAME = 'one'"


@pytest.fixture
def fake_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the code that runs in place of a step; the fourth of its arguments is the file to write to."""
    step = tmp_path / "bench" / "gpu_slot" / "steps.py"
    step.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def write(code: str) -> None:
        step.write_text(code)

    return write


def test_what_a_step_leaves_behind_holds_nobody_up_and_is_ended(fake_step: Callable[[str], None]) -> None:
    fake_step(
        "import json, pathlib, subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[3]).write_text(json.dumps({'gpu': None, 'found': left.pid}))\n"
    )
    result = run_process("versions", 60, False, {**os.environ, "PYTHONPATH": ""})
    assert result["status"] == "ok"
    assert is_gone(result["found"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_what_a_slot_that_was_killed_left_behind_can_be_ended() -> None:
    mark = f"test-{os.getpid()}"
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "SPECDEC_SLOT_STEP": f"{mark}-1"}) as left:
        end_left_behind(mark)
    assert left.returncode == -signal.SIGKILL


def test_what_a_step_found_before_it_failed_is_kept(fake_step: Callable[[str], None]) -> None:
    fake_step(
        "import pathlib, sys\n"
        'pathlib.Path(sys.argv[3]).write_text(\'{"found": {"a": 1}}\')\n'
        "raise SystemExit('why')\n"
    )
    result = run_process("versions", 60, False, {**os.environ, "PYTHONPATH": ""})
    assert result == {"status": "failed", "found": {"a": 1}, "output": "why\n"}


def test_a_step_that_hangs_shows_its_stacks_and_those_of_its_services(
    fake_step: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_STACK_S", 2.0)
    service = "import time\ndef serving(): time.sleep(600)\nserving()"
    fake_step(
        "import faulthandler, os, signal, subprocess, sys, tempfile\n"
        "faulthandler.dump_traceback_later(float(sys.argv[4].partition('=')[2]))\n"
        "folder = tempfile.mkdtemp()\n"
        f"code = {service!r}\n"
        "log = open(os.path.join(folder, 'target.log'), 'wb')\n"
        "subprocess.Popen([sys.executable, '-c', code], stdout=log, stderr=log, start_new_session=True)\n"
        "def hanging(): signal.sigwait({signal.SIGTERM})\n"
        "hanging()\n"
    )
    logs = tmp_path / "logs"
    result = run_process("versions", 4, False, {**os.environ, "PYTHONPATH": ""}, logs=logs)
    assert result["status"] == "timeout"
    assert "in hanging" in result["output"]
    assert "in hanging" in (logs / "versions.txt").read_text()
    [of_service] = logs.glob("*target.log")
    assert "in serving" in of_service.read_text()


def test_an_error_of_cuda_is_run_again_with_blocking_launches(fake_step: Callable[[str], None]) -> None:
    fake_step(
        "import os\n"
        "raise SystemExit('CUDA error: illegal memory access, blocking ' + os.environ.get('CUDA_LAUNCH_BLOCKING', '0'))"
    )
    result = run_process("versions", 60, False, {**os.environ, "PYTHONPATH": ""})
    assert result["output"].strip().endswith("blocking 0")
    assert result["with blocking launches"].strip().endswith("blocking 1")


def test_logs_come_back_in_one_file_of_limited_size(tmp_path: Path) -> None:
    logs, target = tmp_path / "logs", tmp_path / "slot.logs.tar.xz"
    logs.mkdir()
    for number, size in enumerate((10, 20_000, 300_000)):
        (logs / f"{number}.txt").write_bytes(os.urandom(size))
    archive(logs, target, 100_000)
    assert target.stat().st_size <= 100_000
    with tarfile.open(target) as packed:
        assert packed.getnames() == ["0.txt", "1.txt"]


def test_what_a_step_finds_is_told_while_it_runs(fake_step: Callable[[str], None]) -> None:
    fake_step(
        "import pathlib, signal, sys\n"
        'pathlib.Path(sys.argv[3]).write_text(\'{"found": {"a": 1}}\')\n'
        "signal.sigwait({signal.SIGTERM})\n"
    )
    seen: list[Written] = []
    result = run_process("versions", 3, False, {**os.environ, "PYTHONPATH": ""}, seen.append)
    assert seen == [{"found": {"a": 1}}]
    assert result["status"] == "timeout"


def test_a_step_that_failed_is_told_with_the_end_of_what_it_said() -> None:
    shown = told("steps", {"status": "failed", "found": {"a": 1}, "output": f"{'x' * 5000}\nthe reason"})
    assert shown.startswith('steps: failed, {"a": 1}\n')
    assert shown.endswith("the reason")
    assert len(shown) < 4000


def test_a_slot_that_writes_elsewhere_goes_on_from_earlier_results(tmp_path: Path) -> None:
    out, earlier = tmp_path / "out.json", tmp_path / "earlier.json"
    assert found_so_far(out, earlier, dry=False) == {}
    earlier.write_text('{"versions": {"status": "ok"}}')
    assert found_so_far(out, earlier, dry=False) == {"versions": {"status": "ok"}}
    out.write_text("{}")
    assert found_so_far(out, earlier, dry=False) == {}


def test_a_dry_slot_leaves_a_real_one_nothing_done(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text('{"machine": {"dry": true}, "versions": {"status": "ok"}}')
    assert found_so_far(out, out, dry=False) == {}
    assert "versions" in found_so_far(out, out, dry=True)


def test_wheels_that_are_not_there_end_the_slot_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no archive, and no folder of wheels"):
        unpack(tmp_path / "wheels.tar.xz", tmp_path)


def test_results_say_what_they_are_of_on_a_machine_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert versions()["specdec"] == "unknown"
