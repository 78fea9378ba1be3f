"""The driver of a Ray job: reserves the nodes, runs the recipe on them and ends as the run does.

`python -m launcher.schedulers.ray_job RUN_DIR`, the entrypoint of the job that schedulers/ray.py submits. A
placement group has one bundle per node, with an actor (ray_node.py) that runs the command of its node. When
a node is lost, the run starts again on other nodes, as often as `launch.max_restarts` allows.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from launcher import __version__
from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RunFailed
from launcher.execute.run_dir import SUBMITTED
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.safe_files import parse_json
from launcher.recipe.loading import load_recipe
from launcher.schedulers.ray_node import RayNode

JOB = "ray.json"
"""In the run directory: what is submitted (`job`) and what this driver does (`driver`)."""
END_S = 60.0
"""Nodes end each other; one that has not ended this long after another one is stopped."""
KILL_S = 15.0
"""Between a kill and the moment when a node is given up."""
_POLL_S, _DEATH_S = 2.0, 60.0
"""Between two looks at the cluster; time in which Ray notices that a node is gone."""
Ending = tuple[int, int | None, str]
"""Of a node: its rank, its exit code or None where it was lost, and why."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What the job is: `driver` of ray.json."""

    effilaunch: str
    """Version that wrote it."""
    nodes: int
    least: int
    """As many as `nodes` unless the run is elastic."""
    per_node: str
    """Hardware of a node, as --on writes it."""
    bundle: Mapping[str, float]
    """Resources of each node."""
    tiny: bool
    prepare: bool
    cwd: str
    wait_seconds: int
    """How long the job waits for nodes that the cluster does not have."""
    stop_seconds: int
    """Time that a stop takes: a step, a save, and the exit."""
    max_restarts: int
    env: Mapping[str, str]
    """Variables of the runtime environment."""

    @property
    def is_elastic(self) -> bool:
        return self.least < self.nodes


@dataclass(slots=True)
class RayStop:
    """The signal that asked the job to stop."""

    number: int = 0
    count: int = 0
    told: int = 0
    """How many of them the nodes know."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number, self.count = number, self.count + 1

    def raise_if_asked(self) -> None:
        """Interrupted (130) if it was, while no node is running."""
        if self.count:
            message = f"{signal.Signals(self.number).name}: the job was stopped while it waited for its nodes"
            raise Interrupted(Problem("interrupted", message))


@dataclass(slots=True)
class Reserved:
    """Nodes with their actors."""

    actors: list[Any]
    facts: list[dict[str, Any]] = field(default_factory=list)

    def name(self, rank: int) -> str:
        facts = self.facts[rank]
        return f"{facts['name']} ({facts['address']})"


def say(text: str) -> None:
    """A line of the job's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def drive(run_dir: Path) -> int:
    """Run the job to its end; its exit code. Raises what `run` would raise."""
    spec = read_spec(run_dir)
    load_recipe(str(run_dir / SUBMITTED))  # variables that are not set, keys that this version does not have
    ray.init(log_to_driver=False, logging_level="warning")
    stop = RayStop()
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which installs its own
        signal.signal(number, stop)
    require_room(spec, stop)
    check_candidates(spec, run_dir)
    if spec.prepare:
        code = prepare(spec, run_dir, stop)
        if code != 0:
            return code
    again = f"`effilaunch submit {run_dir} --requeue` resumes the run"
    failures, newest = 0, newest_checkpoint(run_dir)
    while True:
        with reserved(spec, run_dir, stop) as nodes:
            endings = run_on(nodes, spec, run_dir, stop)
        gone = [(nodes.name(rank), why) for rank, code, why in endings if code is None]
        if not gone or stop.count or (spec.is_elastic and endings[0][1] == 0):
            return exit_code(endings, spec)
        names = ", ".join(name for name, _ in gone)
        step = newest_checkpoint(run_dir)
        failures, newest = (1 if step > newest else failures + 1), max(step, newest)
        if failures > spec.max_restarts:
            raise RunFailed(Problem("node-lost", f"{names} was lost: {gone[0][1]}", hint=again))
        await_deaths({nodes.facts[rank]["id"] for rank, code, _ in endings if code is None})
        try:
            require_room(spec, stop)
        except MachineError as error:
            message = f"{names} was lost, and {error.problems[0].message}"
            later = f"{again} when there are nodes again"
            raise RunFailed(Problem("node-lost", message, hint=later)) from None
        say(f"{names} was lost; restart {failures} of {spec.max_restarts} from the checkpoint of step {step}")


def read_spec(run_dir: Path) -> Spec:
    """The job's specification. MachineError where this node does not see it, or has another effilaunch."""
    try:
        spec = Spec(**parse_json((run_dir / JOB).read_text("utf-8"))["driver"])
    except OSError as error:
        raise MachineError(_absent(f"{run_dir / JOB} ({error.strerror})", "the head node")) from None
    if spec.effilaunch != __version__:
        raise MachineError(_other_version("the head node", __version__, spec))
    return spec


def _absent(path: str, where: str) -> Problem:
    message = f"{where} does not see {path}"
    hint = "the run directory must be on a file system that all nodes see under this path (--output-dir)"
    return Problem("ray-files", message, hint=hint)


def _other_version(where: str, version: str, spec: Spec) -> Problem:
    message = f"{where} has effilaunch {version}, and the job was submitted with {spec.effilaunch}"
    hint = "install the same version in the environment of the Ray nodes, or with launch.ray.runtime_env"
    return Problem("ray-environment", message, hint=hint)


def suitable(spec: Spec) -> list[str]:
    """Ids of the living nodes that have the resources of a bundle, be they in use or not."""
    return [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        and all(node["Resources"].get(name, 0) >= count for name, count in spec.bundle.items())
    ]


def require_room(spec: Spec, stop: RayStop) -> None:
    """Return when the cluster has enough nodes. MachineError (4) if it has not after `wait_seconds`."""
    deadline, told = time.monotonic() + spec.wait_seconds, False
    while (count := len(suitable(spec))) < spec.least:
        what = f"the cluster has {count} node(s) with {shown(spec.bundle)}, and the run needs {spec.least}"
        if time.monotonic() >= deadline:
            hint = "launch.ray.wait_seconds lets the job wait for nodes that are started later"
            raise MachineError(Problem("ray-resources", what, hint=hint))
        if not told:
            told = True
            say(f"{what}: waiting for up to {spec.wait_seconds} s")
        stop.raise_if_asked()
        time.sleep(_POLL_S)


def shown(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in bundle.items())


def check_candidates(spec: Spec, run_dir: Path) -> None:
    """MachineError (4) where nodes that could run the job lack effilaunch or the files. Uses no resources."""
    actor = ray.remote(RayNode)
    actors = [
        actor.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in suitable(spec)[: spec.nodes]
    ]
    try:
        facts_of(actors, spec, run_dir)
    finally:
        for one in actors:
            ray.kill(one)


def facts_of(actors: Sequence[Any], spec: Spec, run_dir: Path) -> list[dict[str, Any]]:
    """The facts of all nodes. MachineError (4) with the problems of all."""
    asked = [one.facts.remote([str(run_dir / SUBMITTED), str(run_dir / JOB)]) for one in actors]
    found, problems = [], list[Problem]()
    for ref in asked:
        try:
            found.append(ray.get(ref))
        except RayError as error:
            message = f"a node cannot run effilaunch: {reason(error)}"
            hint = "install it in the environment of the Ray nodes, or with launch.ray.runtime_env"
            problems.append(Problem("ray-environment", message, hint=hint))
    for facts in found:
        name = f"node {facts['name']} ({facts['address']})"
        problems += [_absent(path, name) for path in facts["absent"][:1]]
        if facts["effilaunch"] != spec.effilaunch:
            problems.append(_other_version(name, facts["effilaunch"], spec))
    if problems:
        raise MachineError(list(dict.fromkeys(problems)))
    return found


def reason(error: BaseException) -> str:
    """The telling line of an error of Ray's, whose text is a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or "Error(" in line]
    return (named or lines or [type(error).__name__])[-1]


def prepare(spec: Spec, run_dir: Path, stop: RayStop) -> int:
    """Prepare the data on one CPU, before devices are reserved; the exit code."""
    say("preparing the data")
    actor = ray.remote(RayNode).options(num_cpus=1, max_concurrency=2).remote()
    nodes = Reserved([actor], facts_of([actor], spec, run_dir))
    words = ["prepare", str(run_dir / SUBMITTED), *(["--tiny"] if spec.tiny else [])]
    try:
        ((_, code, why),) = follow(nodes, [words], spec, run_dir, stop)
    finally:
        ray.kill(actor)
    if code is None:
        raise RunFailed(Problem("node-lost", f"{nodes.name(0)} was lost while it prepared the data: {why}"))
    return code


@contextlib.contextmanager
def reserved(spec: Spec, run_dir: Path, stop: RayStop) -> Iterator[Reserved]:
    """The nodes, once all are free at the same time; released at the end."""
    count = min(spec.nodes, len(suitable(spec)))
    strategy = "STRICT_SPREAD" if count > 1 else "PACK"
    group = placement_group([dict(spec.bundle)] * count, strategy=strategy)
    try:
        if not group.wait(_POLL_S):
            say(f"waiting for {count} node(s) with {shown(spec.bundle)}, which are in use")
        while not group.wait(_POLL_S):
            stop.raise_if_asked()
            require_room(spec, stop)
        options = {"num_cpus": spec.bundle.get("CPU", 0), "num_gpus": spec.bundle.get("GPU", 0)}
        actor = ray.remote(RayNode)
        nodes = Reserved(
            [
                actor.options(
                    **options,
                    max_concurrency=2,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                ).remote()
                for index in range(count)
            ]
        )
        nodes.facts = facts_of(nodes.actors, spec, run_dir)
        say(f"nodes: {', '.join(map(nodes.name, range(count)))}")
        yield nodes
    finally:
        remove_placement_group(group)  # kills the actors


def run_on(nodes: Reserved, spec: Spec, run_dir: Path, stop: RayStop) -> list[Ending]:
    """Run the recipe on all nodes to its end."""
    words = ["run", str(run_dir / SUBMITTED), "--output-dir", str(run_dir), "--resume", "auto"]
    words += ["--tiny"] if spec.tiny else []
    head, count = nodes.facts[0], len(nodes.actors)
    if count < spec.nodes:  # of an elastic run; the batch stays that of all nodes
        words += ["--on", spec.per_node if count == 1 else f"{count}x{spec.per_node}"]
        words += ["--set", f"launch.max_nodes={spec.nodes}"]
    address = f"[{head['address']}]" if ":" in head["address"] else head["address"]
    place = ["--master-addr", f"{address}:{head['port']}"] if count > 1 else []
    ranks = [[*place, "--node-rank", str(rank)] if place else [] for rank in range(count)]
    return follow(nodes, [[*words, *rank] for rank in ranks], spec, run_dir, stop)


def follow(
    nodes: Reserved, commands: Sequence[Sequence[str]], spec: Spec, run_dir: Path, stop: RayStop
) -> list[Ending]:
    """Start a command on each node and return when all have ended, in the order of the ranks.

    A signal is passed on. When one node fails, the others have END_S to end by themselves, then
    `stop_seconds` after SIGTERM. An elastic run continues until node rank 0 ends.
    """
    ended: queue.Queue[Ending] = queue.Queue()
    folder = spec.cwd if Path(spec.cwd).is_dir() else str(run_dir)
    for rank, words in enumerate(commands):
        args = (nodes.actors[rank], rank, words, folder, spec.env, ended.put)
        threading.Thread(target=_read, args=args, daemon=True).start()
    endings: dict[int, Ending] = {}
    steps = _Escalation(spec.stop_seconds)
    while len(endings) < len(commands):
        with contextlib.suppress(queue.Empty):
            ending = ended.get(timeout=0.5)
            endings[ending[0]] = ending
            if ending[1] != 0 and (ending[0] == 0 or not spec.is_elastic):
                steps.begin()
        if stop.count > stop.told:
            stop.told = stop.count
            steps.asked(stop.count)
        number = steps.due()
        for rank in range(len(commands)) if number else ():
            if rank not in endings:
                nodes.actors[rank].signal.remote(number)
        if steps.is_over:
            for rank in set(range(len(commands))) - endings.keys():
                endings[rank] = (rank, None, "it did not end, and did not answer")
    return [endings[rank] for rank in sorted(endings)]


def _read(
    actor: Any,
    rank: int,
    words: Sequence[str],
    folder: str,
    env: Mapping[str, str],
    ended: Callable[[Ending], None],
) -> None:
    """Print the output of one node; its lines begin with its rank, but for rank 0."""
    prefix, code = f"{rank}: " if rank else "", None
    try:
        for ref in actor.run.options(num_returns="streaming").remote(list(words), folder, dict(env)):
            line = ray.get(ref)
            if isinstance(line, int):
                code = line
            else:
                say(prefix + line)
    except RayError as error:
        ended((rank, None, reason(error)))
    else:
        ended((rank, code, ""))


class _Escalation:
    """Which signal the nodes get when: SIGTERM, then SIGKILL, then they are given up."""

    def __init__(self, stop_seconds: float) -> None:
        self._stop_s = stop_seconds
        self._left: list[tuple[float, int]] = []
        """Moments and the signal that is sent then; 0: they are given up."""
        self.is_over = False

    def begin(self) -> None:
        """A node has failed."""
        if not self._left:
            self._plan(time.monotonic() + END_S)

    def asked(self, count: int) -> None:
        """The job was asked to stop; the second time, at once."""
        self._plan(time.monotonic())
        if count > 1:
            self._left = self._left[1:]
            self._left[0] = (time.monotonic(), signal.SIGKILL)

    def _plan(self, first: float) -> None:
        kill = first + self._stop_s
        self._left = [(first, signal.SIGTERM), (kill, signal.SIGKILL), (kill + KILL_S, 0)]

    def due(self) -> int:
        """The signal to send now; 0 for none."""
        if not self._left or time.monotonic() < self._left[0][0]:
            return 0
        number = self._left.pop(0)[1]
        self.is_over = number == 0
        return number


def exit_code(endings: Sequence[Ending], spec: Spec) -> int:
    """That of node rank 0, which decides for all, unless another node alone failed.

    An elastic run finishes without those that were lost.
    """
    if spec.is_elastic and endings[0][1] is not None:
        return endings[0][1]
    codes = [RunFailed.exit_code if code is None else code for _, code, _ in endings]
    return codes[0] or max(codes)


def await_deaths(ids: set[str]) -> None:
    """Wait until Ray, too, knows that the nodes are gone: it would reserve them again."""
    deadline = time.monotonic() + _DEATH_S
    while time.monotonic() < deadline and any(n["Alive"] and n["NodeID"] in ids for n in ray.nodes()):
        time.sleep(_POLL_S)


def newest_checkpoint(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 without any."""
    return max(complete_checkpoints(run_dir / "checkpoints"), default=0)


def main(argv: Sequence[str]) -> int:
    """RUN_DIR; errors as `effilaunch` prints them."""
    try:
        return drive(Path(argv[0]))
    except EffilaunchError as error:
        for problem in error.problems:
            say("error: " + str(problem).replace("\n", "\n  "))
        return error.exit_code
    except RayError as error:
        say(f"error: Ray: {reason(error)}")
        return MachineError.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
