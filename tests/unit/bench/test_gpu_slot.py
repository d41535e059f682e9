"""A slot on a GPU: it stops in time, goes on where it stopped, and loses nothing to a step that fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu_slot.__main__ import (
    LIMIT_S,
    MOST_ARCHIVE_BYTES,
    STEPS,
    archive,
    found_so_far,
    module_of,
    run_slot,
)
from bench.gpu_slot.aims import AIMS, Aim, figures
from bench.gpu_slot.machine import lacking, machine
from bench.gpu_slot.running import Entry, end_left_behind, run_step
from bench.report import versions
from tests.support.for_each import for_each

ROOT = Path(__file__).resolve().parents[3]
DRY = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
H100 = "NVIDIA H100 80GB HBM3"


class Slot:
    """Steps that take as long as they are said to, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.now_s, self.seconds, self.saved = 100.0, seconds, [""]
        self.state: dict[str, Entry] = {}
        self.ran: list[tuple[str, float]] = []
        monkeypatch.setattr("bench.gpu_slot.__main__.time.monotonic", lambda: self.now_s)

    def run(self, name: str, most_s: float) -> Entry:
        self.ran.append((name, most_s))
        self.now_s += min(self.seconds[name], most_s)
        return {"status": "ok" if self.seconds[name] <= most_s else "timeout", "found": None}

    def save(self) -> None:
        self.saved.append(json.dumps(self.state))

    def begin(self, names: Sequence[str], limit_s: float = LIMIT_S) -> dict[str, Entry]:
        run_slot(self.state, names, self.run, self.save, limit_s)
        return self.state


def test_a_second_slot_goes_on_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, graph=5, exactness=60, attention=50)
    names = ["graph", "exactness", "attention"]
    assert "attention" not in slot.begin(names, 70)
    assert slot.ran == [("graph", 60), ("exactness", 60)]  # 5 s are left, in which nothing is begun
    slot.state = json.loads(slot.saved[-1])
    slot.begin(names)
    assert slot.ran[2:] == [("attention", 120)]
    assert json.loads(slot.saved[-1])["attention"] == {"status": "ok", "found": None, "seconds": 50, "earlier": None}


def test_a_step_that_hangs_costs_its_own_time_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, graph=1000, exactness=1)
    state = slot.begin(["graph", "exactness"])
    assert [state[name]["status"] for name in state] == ["timeout", "ok"]
    slot.begin(["graph", "exactness"])
    assert [name for name, _ in slot.ran] == ["graph", "exactness", "graph"]


def test_a_slot_stops_by_itself_at_nine_and_a_half_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT_S == 9.5 * 60
    slot = Slot(monkeypatch, **dict.fromkeys(STEPS, 1e9))
    slot.begin(list(STEPS))
    assert slot.now_s - 100.0 <= LIMIT_S


def test_what_was_running_when_the_machine_was_taken_away_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch)

    def taken_away(name: str, most_s: float) -> Entry:
        raise SystemExit

    with pytest.raises(SystemExit):
        run_slot(slot.state, ["graph"], taken_away, slot.save, LIMIT_S)
    assert json.loads(slot.saved[-1])["graph"]["status"] == "running"


def test_what_a_step_found_before_is_kept_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, steps=1000)
    before = {"gpu": "H", "found": {"a": 1}}
    slot.state = {"steps": {"status": "timeout", **before}}
    for _ in range(2):
        assert slot.begin(["steps"])["steps"] == {"status": "timeout", "found": None, "seconds": 90, "earlier": before}
    slot.seconds["steps"] = 1
    assert slot.begin(["steps"])["steps"] == {"status": "ok", "found": None, "seconds": 1, "earlier": None}


def test_a_step_that_cannot_be_done_in_the_time_left_is_left_and_a_short_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = Slot(monkeypatch, large=1, draft=1)
    assert list(slot.begin(["large", "draft"], 100)) == ["draft"]


def test_what_must_be_known_first_fits_the_first_five_minutes() -> None:
    first = list(STEPS)[: list(STEPS).index("speedup") + 1]
    assert first == ["graph", "greedy", "steps", "speedup"]
    assert sum(STEPS[name].most_s for name in first[:3]) + STEPS["speedup"].least_s <= 300
    assert {"exactness", "attention", "selftest", "bitwise", "draft", "loaded", "long", "together", "failover"} < set(
        STEPS
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def run_dry(name: str, logs: Path, most_s: float = 900) -> Entry:
    return run_step(name, module_of(name, dry=True), most_s, DRY, logs)


def test_a_step_runs_without_a_gpu_and_says_what_it_found(logs: Path) -> None:
    result = run_dry("exactness", logs)
    assert result == {"status": "ok", "found": {"scores that differ": 0}}


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_every_step_runs_without_a_gpu(name: str, logs: Path) -> None:
    result = run_dry(name, logs)
    assert result["status"] == "ok", result
    assert (
        "passed" in (logs / f"{name}.txt").read_text() if "pytest" in STEPS[name].module else figures(result["found"])
    )


def test_steps_run_on_a_gpu_unless_they_are_dry() -> None:
    for name in STEPS:
        real, dry = module_of(name, dry=False), " ".join(module_of(name, dry=True))
        assert not {"cpu", "shipped", "tiny"} & set(real)
        assert "tests.support.fake_cuda.runners" in dry or "--device cpu" in dry
        assert not any(text in dry for text in ("cuda ", "256", "gpu-8b", "llama", "1024", "32768"))


def test_a_bare_machine_is_told_what_it_lacks_before_any_step(tmp_path: Path) -> None:
    bare = {**DRY, "HOME": str(tmp_path / "nowhere"), "CC": str(tmp_path / "cc"), "PATH": ""}
    ends = ["--only", "graph", "--out", str(tmp_path / "out.json")]
    told = subprocess.run(
        [sys.executable, "-S", "-m", "bench.gpu_slot", *ends],
        env={**bare, "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 2, told.stderr
    lines = told.stdout.splitlines()
    assert len(lines) >= 5 and "graph" not in told.stdout
    assert all(any(word in line for line in lines) for word in ("torch", "grpcio", "nvidia-smi", "gcc"))


def test_a_machine_with_all_it_needs_lacks_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, said in (("nvidia-smi", f"{H100}, 81559, 580.159.04, Default, Disabled, 700.00"), ("gcc", "gcc 13")):
        (tools / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr("bench.gpu_slot.machine.Path.is_file", lambda path: True)
    found = machine([], dry=False)
    assert lacking(found) == []
    assert found["gpu"].startswith(H100)
    assert lacking({**found, "packages": {}, "Python.h": False})[-1].startswith("Python.h")


def test_steps_with_engines_need_no_packages_of_services() -> None:
    code = "import sys, tests.gpu.test_device_steps, bench.shaped; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=DRY, check=True)


def closure(pending: list[tuple[str, str]]) -> set[str]:
    """Distributions that these with their extras need on Python 3.12, but for torch, triton and specdec itself."""
    found: set[str] = set()
    for name, extra in pending:  # grows
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            environment = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": extra}
            own = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate(environment):
                continue
            if re.match(r"specdec|torch|triton|nvidia-|cuda-", own):
                continue
            found.add(own)
            pending += [item for each in ("", *requirement.extras) if (item := (own, each)) not in pending]
    return found


def test_carried_packages_are_what_the_machine_lacks() -> None:
    """The machine to expect has torch, transformers and accelerate with their packages; TLS is not used there."""
    listed = (ROOT / "bench/gpu_slot/packages.txt").read_text().split()
    there = {"transformers", "accelerate"}
    there |= closure([(name, "") for name in there])
    needed = closure([("specdec", ""), ("specdec", "engine"), ("pytest", "")]) | {"pytest"}
    assert {"grpcio", "protobuf", "pytest"} < needed - there
    assert set(listed) >= needed - there - {"cryptography", "cffi", "pycparser"}


@pytest.fixture
def fake_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """Runs code in place of a step, whose argument is the folder to write to."""

    def run(code: str, most_s: float = 60) -> Entry:
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "faked.py").write_text(code)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        return run_step("fake", ["faked", "FOLDER"], most_s, environment, tmp_path / "logs")

    return run


def test_what_a_step_leaves_behind_holds_nobody_up_and_is_ended(fake_step: Callable[..., Entry]) -> None:
    result = fake_step(
        "import json, pathlib, subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1], 'a.json').write_text(json.dumps({'pid': left.pid}))\n"
    )
    assert result["status"] == "ok"
    assert is_gone(result["found"]["pid"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_what_a_slot_that_was_killed_left_behind_can_be_ended() -> None:
    mark = f"test-{os.getpid()}"
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "SPECDEC_SLOT_STEP": f"{mark}-1"}) as left:
        assert end_left_behind(mark)
    assert left.returncode == -signal.SIGKILL


def test_what_a_step_found_before_it_failed_is_kept(fake_step: Callable[..., Entry]) -> None:
    result = fake_step(
        "import pathlib, sys\npathlib.Path(sys.argv[1], 'a.json').write_text('{\"a\": 1}')\nraise SystemExit('why')"
    )
    assert result == {"status": "failed", "found": {"a": 1}, "output": "why\n"}


def test_a_step_that_hangs_shows_its_stacks_and_those_of_its_services(
    fake_step: Callable[..., Entry], logs: Path
) -> None:
    service = "import time\ndef serving(): time.sleep(600)\nserving()"
    result = fake_step(
        "import os, signal, subprocess, sys, tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        f"code = {service!r}\n"
        "log = open(os.path.join(folder, 'target.log'), 'wb')\n"
        "subprocess.Popen([sys.executable, '-c', code], stdout=log, stderr=log, start_new_session=True)\n"
        "def hanging(): signal.sigwait({signal.SIGTERM})\n"
        "hanging()\n",
        8,  # seconds, in which both have started on a slow machine
    )
    assert result["status"] == "timeout"
    assert "in hanging" in result["output"]
    assert "in hanging" in (logs / "fake.txt").read_text()
    [of_service] = logs.glob("*target.log")
    assert "in serving" in of_service.read_text()


def test_an_error_of_cuda_is_run_again_with_blocking_launches(fake_step: Callable[..., Entry], logs: Path) -> None:
    result = fake_step(
        "import os\n"
        "raise SystemExit('CUDA error: illegal memory access, blocking ' + os.environ.get('CUDA_LAUNCH_BLOCKING', '0'))"
    )
    assert result["output"].strip().endswith("blocking 0")
    assert result["with blocking launches"].strip().endswith("blocking 1")
    assert {path.name for path in logs.glob("*")} == {"fake.txt", "fake-blocking.txt"}


def test_what_a_test_has_found_is_told_by_its_properties(fake_step: Callable[..., Entry]) -> None:
    result = fake_step(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'found.xml').write_text('<a><property name=\"x, ms\" value=\"1.5e-05\"/>'\n"
        '    \'<property name="n" value="3"/><property name="id" value="1.2.3/triton"/></a>\')\n'
    )
    assert result["found"] == {"x, ms": 1.5e-05, "n": 3, "id": "1.2.3/triton"}


def test_logs_come_back_in_one_file_of_limited_size(logs: Path, tmp_path: Path) -> None:
    assert MOST_ARCHIVE_BYTES == 16 << 20
    for number, size in enumerate((10, 20_000, 300_000)):
        (logs / f"{number}.txt").write_bytes(os.urandom(size) + b"end")
    archive(logs, tmp_path / "slot.logs.tar.xz", 100_000)
    assert (tmp_path / "slot.logs.tar.xz").stat().st_size <= 100_000
    with tarfile.open(tmp_path / "slot.logs.tar.xz") as packed:
        assert [packed.extractfile(each).read()[-3:] for each in packed] == [b"end"] * 3  # type: ignore[union-attr]
        assert [packed.getmember(f"{number}.txt").size for number in (0, 1)] == [13, 20_003]


def test_a_slot_that_writes_elsewhere_goes_on_from_earlier_results(tmp_path: Path) -> None:
    out, earlier = tmp_path / "out.json", tmp_path / "earlier.json"
    assert found_so_far((out, earlier), dry=False) == {}
    earlier.write_text('{"graph": {"status": "ok"}}')
    assert found_so_far((out, earlier), dry=False) == {"graph": {"status": "ok"}}
    out.write_text("{}")
    assert found_so_far((out, earlier), dry=False) == {}


def test_a_dry_slot_leaves_a_real_one_nothing_done(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text('{"machine": {"dry": true}, "graph": {"status": "ok"}}')
    assert found_so_far((out,), dry=False) == {}
    assert "graph" in found_so_far((out,), dry=True)


def test_results_say_what_they_are_of_on_a_machine_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert versions()["specdec"] == "unknown"


# --- aims


def told(step: str, figure: str, entry: Entry) -> str:
    [aim] = [aim for aim in AIMS if (aim.step, aim.figure) == (step, figure)]
    return aim.told(entry)


@for_each("aim", AIMS)
def test_every_aim_is_measured_by_a_step(aim: Aim) -> None:
    assert aim.step in STEPS


def test_figures_are_told_beside_what_is_aimed_at() -> None:
    one, many = "8b: 1 rows at 1024, ms", "8b: 64 rows at 1024, ms"
    entry = {"gpu": "NVIDIA H200", "found": {one: 4.0, many: 6.0}}
    assert told("steps", one, entry) == f"steps: {one}: 4 (aim: at most 6.4): met"
    assert told("steps", many, entry) == f"steps: {many} over {one}: 1.5 (aim: at most 1.3): MISSED"
    assert told("steps", one, {}) == f"steps: {one}: not measured (aim: at most 6.4 on an H200)"
    assert told("steps", many, {"gpu": "H200", "found": {many: 6.0}}).endswith("not measured (aim: at most 1.3)")
    gain = "speed-up of 1 at temperature 1"
    assert told("speedup", gain, {"gpu": "H200", "found": {gain: 1.2}}).endswith("1.2 (aim: at least 1.4): MISSED")
    later = {"status": "timeout", "found": None, "earlier": entry}
    assert told("steps", one, later) == f"steps: {one}: 4 (aim: at most 6.4): met"


def test_an_aim_says_of_which_gpu_it_is_beside_figures_of_others() -> None:
    one = "8b: 1 rows at 1024, ms"
    assert told("steps", one, {"gpu": H100, "found": {one: 7.0}}).endswith("7 (aim: at most 6.4 on an H200): MISSED")


def test_figures_of_a_report_have_the_names_of_aims() -> None:
    decode = [{"batch": 32, "temperature": t, "speedup": {"median": r}} for t, r in ((0.0, 0.98), (1.0, 0.9))]
    rows = [
        {"system": name, "tokens": verdict, "tokens_per_s": {"median": speed}}
        for name, verdict, speed in (
            ("specdec, speculation", "equal", 30.0),
            ("transformers, assisted", "VOID: differs at token 3 of prompt 0, gap 1", 10.0),
        )
    ]
    found = figures({"decode": decode, "systems": {"cases": [{"temperature": 0.0, "rows": rows}]}})
    assert told("loaded", "speed-up of 32 at temperature 1", {"found": found}).endswith("MISSED")
    assert told("loaded", "speed-up of 32 at temperature 0", {"found": found}).endswith("met")
    assert told("assisted", "tokens/s of specdec, speculation at temperature 0", {"found": found}).endswith("met")
    assert told("assisted", "systems with other tokens", {"found": found}).endswith(
        "1 (aim: at most 0 on an H200): MISSED"
    )
    assert figures({"tokens": 3}) == {"tokens": 3}
