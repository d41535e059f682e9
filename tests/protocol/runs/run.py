"""Runs a schedule: a deployment to which things happen, then nothing, until all its requests have ended."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.replica.bridge.engine_watch import EndCause
from tests.protocol.runs.schedule import Action, Schedule
from tests.protocol.simulation.faults import Faults
from tests.protocol.simulation.jobs import Ask, Job
from tests.protocol.simulation.safety import findings
from tests.protocol.simulation.watch import Watch
from tests.protocol.simulation.world import World

BOOT_S = 1.0
"""From the start to the first action: everybody has found everybody."""
END_S = 40.0
"""So long after the last fault is mended every request has ended, whatever it went through."""
REST_S = 8.0
"""So long after that nothing is left of them anywhere: orphans have expired, leases have run out."""
_LOOK_S = 0.5
_TEMPERATURES = (0.0, 0.7, 1.0)
_MOST_PROMPT = 12
_MOST_TOKENS = 24
_READER_PAUSES_S = (0.0, 0.0, 0.0, 0.02, 0.2)
_DELAYS_S = (0.02, 0.1, 0.5)
_STEPS_S = (0.001, 0.05, 0.3)
_CUTS_PER_LINK = 4
"""Cuts per one of a link between a draft and a target; the others are a coordinator's."""
_CAUSES = tuple(EndCause)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    violations: tuple[str, ...]
    num_requests: int
    num_tokens: int
    """That clients got."""
    num_linked: int
    """Verdicts whose tokens went to a draft directly."""
    ended_s: float
    """How long after the last fault was mended the last request ended."""


def run(schedule: Schedule) -> Outcome:
    """Do what the schedule says, mend everything, and wait for the end."""
    world = World(schedule.seed, schedule.shape)
    try:
        watch, actions = Watch(world), _Actions(Faults(world))
        world.run(BOOT_S)
        for action in schedule.actions:
            world.run(action.pause_s)
            actions.take(action)
        actions.faults.mend_all()
        ended_s = 0.0
        while ended_s < END_S and not all(job.is_over for job in world.jobs):
            world.run(_LOOK_S)
            ended_s += _LOOK_S
            actions.faults.mend_all()  # nodes that were about to leave, requests whose client was busy
        watch.check_jobs()
        world.run(REST_S)
        watch.check_rest()
        watch.check_log()
        num_tokens = sum(len(choice.token_ids) for job in world.jobs for choice in job.got.choices.values())
        found = tuple(findings(watch.violations))
        return Outcome(found, len(world.jobs), num_tokens, watch.num_linked, ended_s)
    finally:
        world.close()


class _Actions:
    """Turns picks into what they mean now."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._world = faults.world

    def take(self, action: Action) -> None:
        """Let it happen."""
        faults, world, (first, second, third, fourth) = self.faults, self._world, action.picks
        nodes, replicas, jobs = world.nodes, world.replicas, world.jobs
        node, other = nodes[first % len(nodes)], nodes[second % len(nodes)]
        replica, coordinator = replicas[first % len(replicas)], world.coordinators[first % len(world.coordinators)]
        match action.kind:
            case "submit":
                pause_s = _READER_PAUSES_S[fourth % len(_READER_PAUSES_S)]
                faults.submit(_ask(first, second, third), pause_s)
            case "disconnect" | "resume" | "steal" | "abort" if jobs:
                self._to_job(action.kind, jobs[first % len(jobs)], second)
            case "cut":
                faults.cut(node, coordinator, late=(None, node, coordinator)[third % 3])
            case "cut" if not fourth % _CUTS_PER_LINK:
                faults.cut_link(world.drafts[first % len(world.drafts)], world.targets[second % len(world.targets)])
            case "block":
                faults.block(node, other)
            case "unblock":
                faults.unblock()
            case "delay":
                faults.delay(node, other, _DELAYS_S[third % len(_DELAYS_S)])
            case "kill":
                faults.kill(node)
            case "start":
                for down in nodes:
                    faults.start(down)
            case "leave":
                faults.leave(node, drain_s=third % 5 / 10)
            case "freeze":
                faults.freeze(node)
            case "thaw":
                for frozen in nodes:
                    faults.thaw(frozen)
            case "end-engine":
                faults.end_engine(replica, _CAUSES[third % len(_CAUSES)])
            case "freeze-engine":
                faults.freeze_engine(replica)
            case "slow":
                faults.slow(replica, _STEPS_S[third % len(_STEPS_S)])
            case "silence-store":
                faults.silence_store()
            case "deafen-store":
                faults.deafen_store()
            case "part-from-store":
                faults.part_from_store(coordinator)
            case "mend-store":
                faults.mend_store()
            case "empty-store":
                faults.empty_store()

    def _to_job(self, kind: str, job: Job, pick: int) -> None:
        match kind:
            case "disconnect":
                self.faults.leave_job(job)
            case "resume":
                self.faults.resume_job(job)
            case "steal":
                self.faults.steal_job(job)
            case "abort":
                self.faults.abort_job(job, self._world.coordinators[pick % len(self._world.coordinators)])


def _ask(first: int, second: int, third: int) -> Ask:
    """Prompts share beginnings, so that prefix caches have something to give."""
    prompt = tuple(5 + (i * (1 + second % 2)) % 7 for i in range(2 + first % _MOST_PROMPT))
    return Ask(
        prompt=prompt,
        seed=second,
        temperature=_TEMPERATURES[third % len(_TEMPERATURES)],
        max_tokens=1 + third % _MOST_TOKENS,
        num_choices=1 + (first % 5 == 0),
    )
