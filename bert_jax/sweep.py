"""Sweeps: many runs by name, what each needs first, and a line of results for each.

A sweep is a Python file that says what there is to run; dependencies need no list, they are the
points that a point's command names:

    from bert_jax.sweep import Point, grid

    def get_points(given):
        rows = Point("rows", ("prepare", "--vocab", given.data / "vocab", given.data / "text/*"))
        for size in grid(layers=(2, 4), hidden=(128, 256)):
            name = "L{layers}-H{hidden}-A2".format(**size)
            config = f"configs/pretrain.py:{name},128"
            model = Point(name, ("pretrain", "--config", config, "--rows", rows), size)
            yield Point(f"{name}/rte", ("finetune", "--config", "configs/glue.py:rte", "--init", model), size)

A point is a command of `bert-jax` ("python" for a script) and makes one folder, which is told to it
by --workdir or --out. Folders carry a hash of all that their content follows from, so that sweeps
share what they have in common; below `--runs`, NAME-HASH holds

out/             what the command makes
log              what it said
attempts.jsonl   every start of it: when, how long, how it ended
"""

import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import pathlib
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax import config as config_lib
from bert_jax import files, launch, workdir
from bert_jax.config import Config, FinetuneConfig
from bert_jax.data.compressed import SUFFIXES
from bert_jax.data.rows import MANIFEST, read_manifest
from bert_jax.errors import UserError
from bert_jax.tasks import glue
from bert_jax.tasks.pretraining import USUAL_VOCAB_SIZE

SCALES = ("small", "paper")
RESULTS, ATTEMPTS, LOG, OUT = "results.jsonl", "attempts.jsonl", "log", "out"
# The option by which a verb is told what folder to make.
_FOLDER_OPTION = {
    **dict.fromkeys(("pretrain", "finetune"), "--workdir"),
    **dict.fromkeys(("vocab", "prepare", "import", "export", "python"), "--out"),
}
# Verbs that other engines run; all else is done here.
_LAUNCHED = ("pretrain", "finetune")
# Engines that queue a job and return: it is over when its workdir says so.
HANDED_OVER = ("slurm", "gke", "sky")
# A run that is stopped by others (75) is started again so many times.
_RESTARTS = 100
_LOOK_SECONDS = 0.2
# Of a chip's data-sheet FLOP/s, for estimates where nothing was measured; of a CPU core's, 32-bit.
UTILIZATION, _CORE_FLOPS = 0.4, 4e10
_BYTES_A_TOKEN, _COMPRESSION = 5.0, 3.0


class Given(NamedTuple):
    """What a sweep is asked for.

    Attributes:
        scale: one of `SCALES`: the paper's data and sizes, or what a laptop does in an hour.
        data: the folder of texts and tasks.
        init: a checkpoint to fine-tune, where the sweep is about somebody's.
        seeds: how many; 0 leaves it to the sweep.
    """

    scale: str = "small"
    data: pathlib.Path = pathlib.Path()
    init: str = ""
    seeds: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """One thing to run.

    Attributes:
        name: unique in its sweep, such as "L4-H256-A4/rte".
        command: of `bert-jax`, from the verb on, without the folder it makes; a point in it stands
            for that point's folder.
        facts: what the point is, by name: results carry them, tables are made by them.
    """

    name: str
    command: Sequence[Any]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    _digests: dict[str, str] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def verb(self) -> str:
        """The first word of the command."""
        return str(self.command[0])

    @functools.cached_property
    def needs(self) -> list["Point"]:
        """The points that the command names."""
        return [part for part in self.command if isinstance(part, Point)]

    def told(self, data: pathlib.Path | str) -> list[str]:
        """The command with points by name and the data's folder by a word, as it is published."""
        return [
            f"<{part.name}>"
            if isinstance(part, Point)
            else re.sub(rf"{re.escape(str(data))}(?=/|$)", "$BERT_JAX_DATA", str(part))
            for part in self.command
        ]

    def digest(self, data: pathlib.Path | str) -> str:
        """A hash of the command and those that it stands on, wherever the data lie.

        Of a script it is a hash of the program too.
        """
        if str(data) not in self._digests:
            parts = [
                part.digest(data) if isinstance(part, Point) else told
                for part, told in zip(self.command, self.told(data), strict=True)
            ]
            if self.verb == "python" and pathlib.Path(self.command[1]).is_file():
                parts.append(files.sha256(str(self.command[1])))
            found = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]
            self._digests[str(data)] = found
        return self._digests[str(data)]


def grid(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the choices, the last one changing fastest."""
    return [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]


def sample(count: int, seed: int, **choices: Any) -> list[dict[str, Any]]:
    """So many random combinations.

    Args:
        count: how many.
        seed: of the draws.
        choices: a list to choose from, (low, high) for a number between them, or (low, high, "log")
            for one whose logarithm is uniform.
    """
    source = random.Random(seed)

    def draw(choice: Any) -> Any:
        if isinstance(choice, list):
            return source.choice(choice)
        low, high, *log = choice
        return math.exp(source.uniform(math.log(low), math.log(high))) if log else source.uniform(low, high)  # fmt: skip

    return [{name: draw(choice) for name, choice in choices.items()} for _ in range(count)]


class Sweep(NamedTuple):
    """A sweep's file, read.

    Attributes:
        path: of the file.
        given: what it was asked for.
        points: in an order in which each comes after what it needs.
        module: the file as a module.
    """

    path: pathlib.Path
    given: Given
    points: list[Point]
    module: Any


def load(path: str | os.PathLike, given: Given) -> Sweep:
    """Reads a sweep and puts its points in order.

    Args:
        path: of the file, or of the folder with a sweep.py.
        given: handed to it.

    Raises:
        UserError: no such file, an error in it, two different points of one name.
    """
    path = pathlib.Path(path)
    path = path / "sweep.py" if path.is_dir() else path
    module = module_of(path)
    if not hasattr(module, "get_points"):
        raise UserError(f"{path} is no sweep: it has no get_points(given)")
    try:
        yielded = list(module.get_points(given))
    except UserError:
        raise
    except Exception as error:  # a program of the user's: anything may come out of it
        raise UserError(f"{path}: get_points: {type(error).__name__}: {error}") from error
    for each in yielded:
        if not isinstance(each, Point):
            raise UserError(f"{path}: get_points yielded {each!r}, which is no Point")
    return Sweep(path, given, ordered(path, yielded, given.data), module)


def module_of(path: pathlib.Path) -> Any:
    """A sweep's file as a module.

    Raises:
        UserError: no such file, or an error in it.
    """
    spec = importlib.util.spec_from_file_location(f"sweep_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    # What several sweeps have in common lies beside their folders.
    beside = str(path.resolve().parent.parent)
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise UserError(f"there is no sweep {path}") from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(f"cannot load {path}: {type(error).__name__}: {text}") from error
    finally:
        sys.path.remove(beside)
    return module


def ordered(where: Any, yielded: Iterable[Point], data: pathlib.Path) -> list[Point]:
    """Points and all that they need, each after what it needs and none twice.

    Raises:
        UserError: a verb that makes no folder; two different points of one name.
    """
    found: dict[str, Point] = {}

    def add(point: Point) -> None:
        for needed in point.needs:
            add(needed)
        if point.verb not in _FOLDER_OPTION:
            raise UserError(
                f"{where}: {point.name}: {point.verb!r} is not among what a sweep runs: "
                + ", ".join(_FOLDER_OPTION)
            )
        before = found.setdefault(point.name, point)
        if before.digest(data) != point.digest(data):
            raise UserError(f"{where}: two different points are called {point.name!r}")

    for point in yielded:
        add(point)
    return list(found.values())


class Place:
    """Where a point is run and what is known of it there.

    Args:
        point: the point.
        runs: the folder of all sweeps' points.
        data: the folder of the data.
    """

    def __init__(self, point: Point, runs: pathlib.Path, data: pathlib.Path):
        digest = point.digest(data)
        there = sorted(runs.glob(f"*-{digest}"))  # another sweep may call it otherwise
        self.point, self.digest = point, digest
        name = re.sub(r"[^\w.-]+", ".", point.name)
        self.folder = there[0] if there else runs / f"{name}-{digest}"
        self.out, self.log = self.folder / OUT, self.folder / LOG

    def attempts(self) -> list[dict[str, Any]]:
        """Every start so far."""
        path = self.folder / ATTEMPTS
        return workdir.read_lines(path) if path.exists() else []

    def add(self, **attempt: Any) -> None:
        """Notes a start that has ended or was handed over."""
        with open(self.folder / ATTEMPTS, "a") as file:
            file.write(json.dumps(attempt) + "\n")

    @property
    def is_done(self) -> bool:
        """Whether it need not be run any more."""
        attempts = self.attempts()
        if any(attempt["status"] == 0 for attempt in attempts):
            return True
        return bool(attempts) and attempts[-1]["status"] is None and _has_ended(self.out)

    @property
    def is_submitted(self) -> bool:
        """Whether a job was queued for it that is not known to have ended."""
        attempts = self.attempts()
        return bool(attempts) and attempts[-1]["status"] is None and not self.is_done

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _has_ended(out: pathlib.Path) -> bool:
    """Whether a workdir holds a run that has come to its end, whoever ran it."""
    if (out / "metrics.json").exists():
        return True
    if not (out / "config.json").exists():
        return False
    config = workdir.read_config(out)
    steps = [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return isinstance(config, Config) and max(steps, default=0) >= config.steps


class Engine(NamedTuple):
    """What runs the points.

    Attributes:
        on: "local", or an engine of `launch`.
        options: arguments to `bert-jax launch`.
        jobs: points at a time.
    """

    on: str = "local"
    options: Sequence[str] = ()
    jobs: int = 1

    def command(self, point: Point, places: dict[str, Place]) -> list[str]:
        """The whole command of a point."""
        parts = [
            str(places[part.name].out) if isinstance(part, Point) else str(part)
            for part in point.command
        ]
        where = [_FOLDER_OPTION[point.verb], str(places[point.name].out)]
        if point.verb == "python":
            return [sys.executable, *parts[1:], *where]
        if self.on == "local" or point.verb not in _LAUNCHED:
            return [*launch.here(), *parts, *where]
        name = f"{launch.job_name(point.name, 28)}-{places[point.name].digest}"
        how = ["--on", self.on, "--name", name, *self.options]
        return [*launch.here(), "launch", *how, "--", *parts, *where]

    def hands_over(self, point: Point) -> bool:
        """Whether its command returns before the point is run."""
        return self.on in HANDED_OVER and point.verb in _LAUNCHED


class _Running(NamedTuple):
    place: Place
    process: subprocess.Popen | None  # None: a job that was handed over
    begun: float
    lock: contextlib.ExitStack


class Scheduler:
    """Runs points, each when what it needs is done.

    Args:
        runs: the folder of all points.
        given: for the data's folder.
        engine: what runs them.
        resubmit: queue jobs again that were handed over and have not ended.
        done: called once for each point that is done, with its place.

    Attributes:
        state: of each point by name: "waiting", "running", "done", "failed", "stopped" (saved, by a
            signal), "blocked" (what it needs has failed).
    """

    def __init__(
        self,
        runs: pathlib.Path,
        given: Given,
        engine: Engine,
        resubmit: bool,
        done: Callable[[Place], None],
    ):
        self.places: dict[str, Place] = {}
        self.state: dict[str, str] = {}
        self._runs, self._given, self._engine, self._done = runs, given, engine, done
        self._resubmit = resubmit
        self._running: dict[str, _Running] = {}
        self._restarts: dict[str, int] = {}
        self._stopping = False

    def add(self, points: Iterable[Point]) -> None:
        """Takes points on, each after what it needs; what is done already is so at once."""
        for point in points:
            place = Place(point, self._runs, self._given.data)
            self.places[point.name], self.state[point.name] = place, "waiting"
            if place.is_done:
                self._finish(place)

    def stop(self) -> None:
        """Starts nothing more and tells what runs here to save and end."""
        self._stopping = True
        for name, running in list(self._running.items()):
            if running.process is None:  # it goes on without us
                self._release(name, "stopped")
            else:
                running.process.terminate()

    def kill(self) -> None:
        """Ends what runs here at once."""
        for running in self._running.values():
            if running.process is not None:
                running.process.kill()

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more is started."""
        return self._stopping

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing can."""
        return not self._running and (self._stopping or "waiting" not in self.state.values())

    def look(self) -> None:
        """Takes note of what has ended and starts what can be."""
        for name, running in list(self._running.items()):
            if running.process is None:
                if running.place.is_done:
                    self._release(name, "done")
            elif running.process.poll() is not None:
                self._ended(name, running, launch.exit_status(running.process))
        if self._stopping:
            return
        for name, place in self.places.items():
            if self.state[name] != "waiting":
                continue
            needs = {self.state[needed.name] for needed in place.point.needs}
            if needs & {"failed", "blocked"}:
                self.state[name] = "blocked"
            elif needs <= {"done"} and len(self._running) < self._engine.jobs:
                self._start(name, place)

    def _start(self, name: str, place: Place) -> None:
        with files.one_line_errors(f"cannot use the folder {place.folder}"):
            place.folder.mkdir(exist_ok=True)
        lock = contextlib.ExitStack()
        try:
            held = lock.enter_context(files.only_process(place.folder))
        except UserError:
            return  # another sweep, or what a killed one has started, is at it: wait
        if place.is_done:
            lock.close()
            self._finish(place)
            return
        process = None
        if self._resubmit or not (place.is_submitted and self._engine.hands_over(place.point)):
            command = self._engine.command(place.point, self.places)
            with open(place.log, "ab") as log:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # A Ctrl-C in the terminal would else come twice: from it and from us.
                    start_new_session=True,
                    pass_fds=(held,),
                )
        self._running[name] = _Running(place, process, time.time(), lock)
        self.state[name] = "running"

    def _ended(self, name: str, running: _Running, status: int) -> None:
        handed_over = self._engine.hands_over(running.place.point) and status == 0
        running.place.add(
            begun=datetime.datetime.fromtimestamp(running.begun, datetime.UTC).isoformat(timespec="seconds"),
            seconds=round(time.time() - running.begun, 1),
            status=None if handed_over else status,
            on=self._engine.on,
            load=round(os.getloadavg()[0], 2),
        )  # fmt: skip
        if handed_over:
            self._running[name] = running._replace(process=None)
            return
        restarts = self._restarts.get(name, 0)
        if status == 0:
            self._release(name, "done")
        elif self._stopping:
            self._release(
                name, "stopped" if status in (launch.STOPPED, *launch.KILLED) else "failed"
            )
        elif status == launch.STOPPED and restarts < _RESTARTS:
            self._restarts[name] = restarts + 1
            self._release(name, "waiting")
        else:
            self._release(name, "failed")

    def _release(self, name: str, state: str) -> None:
        running = self._running.pop(name)
        running.lock.close()
        self.state[name] = state
        if state == "done":
            self._finish(running.place)

    def _finish(self, place: Place) -> None:
        self.state[place.point.name] = "done"
        self._done(place)


# Results


def lines_of(place: Place, given: Given) -> list[dict[str, Any]]:
    """What a point that is done adds to the results: a line a seed, else one."""
    point, attempts = place.point, place.attempts()
    common = {
        "point": point.name,
        "scale": given.scale,
        "facts": point.facts,
        "command": shlex.join(["bert-jax", *point.told(given.data)]),
        "digest": place.digest,
    }
    versions = {name: importlib.metadata.version(name) for name in ("bert-jax", "jax", "flax")}
    last = {
        "wall_seconds": round(sum(attempt["seconds"] for attempt in attempts), 1),
        "attempts": len(attempts),
        "load": attempts[-1].get("load") if attempts else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": platform.machine(),
        **versions,
    }  # fmt: skip
    if point.verb not in _LAUNCHED:
        found = place.out / "metrics.json"
        metrics = json.loads(found.read_text()) if found.exists() else _of_rows(place.out)
        return [{**common, "metrics": metrics, **last}]
    runs = sorted(place.out.glob("seed_*"), key=lambda p: int(p.name[5:])) or [place.out]
    return [{**common, **_of_run(run), **last} for run in runs]


def _of_rows(out: pathlib.Path) -> dict[str, Any]:
    if not (out / MANIFEST).exists():
        return {}
    manifest = read_manifest(out)
    return {"train_rows": manifest.train.rows, "heldout_rows": manifest.heldout.rows}


def _of_run(folder: pathlib.Path) -> dict[str, Any]:
    """Of a workdir: settings, tokens, time, metrics."""
    config = workdir.read_config(folder)
    lines = workdir.read_lines(folder / "metrics.jsonl")
    speed = workdir.read_lines(folder / "speed.jsonl")
    starts = workdir.read_lines(folder / "starts.jsonl")
    usual = config_lib.flatten(type(config)())
    flat = config_lib.flatten(config)
    # Paths are this machine's; what they lead to is in the command.
    changed = {
        key: value
        for key, value in flat.items()
        if usual.get(key) != value and not (isinstance(value, str) and "/" in value)
    }
    content = json.dumps(changed, sort_keys=True, default=str)
    told: dict[str, Any] = {}
    if isinstance(config, FinetuneConfig):
        found = json.loads((folder / "metrics.json").read_text())
        metrics = {
            f"{split}.{name}": value
            for split, named in found.items()
            if isinstance(named, dict)
            for name, value in named.items()
        }
        step = found["step"]
    else:
        heldout = [line for line in lines if line["split"] == "heldout"][-1]
        metrics = {k: v for k, v in heldout.items() if k not in ("step", "split")}
        step = heldout["step"]
        told["curve"] = _curve(lines, speed)
    tokens = sum(line["real_tokens_per_second"] * line["seconds"] for line in speed)
    flops = sum(line["flops_per_second"] * line["seconds"] for line in speed)
    return {
        "seed": config.seed,
        "step": step,
        "metrics": metrics,
        "step_seconds": round(sum(line["seconds"] for line in speed), 1),
        "real_tokens": round(tokens),
        "flops": flops,
        "config": json.loads(content),
        "config_hash": hashlib.sha256(content.encode()).hexdigest()[:10],
        "commit": starts[-1]["commit"],
        "devices": starts[-1]["devices"],
        **told,
    }


def _curve(lines: Sequence[dict[str, Any]], speed: Sequence[dict[str, Any]]) -> dict[str, list]:
    """The held-out loss by step, real tokens and seconds of training."""
    curve: dict[str, list] = {"step": [], "real_tokens": [], "seconds": [], "loss": []}
    for line in lines:
        if line["split"] != "heldout":
            continue
        before = [s for s in speed if s["step"] <= line["step"]]
        curve["step"].append(line["step"])
        curve["real_tokens"].append(
            round(sum(s["real_tokens_per_second"] * s["seconds"] for s in before))
        )
        curve["seconds"].append(round(sum(s["seconds"] for s in before), 1))
        curve["loss"].append(
            next(v for k, v in line.items() if k in ("masked_lm_loss", "next_token_loss"))
        )
    return curve


def _flops_a_token(model: config_lib.ModelConfig, config: Any) -> float:
    """Of training, roughly: the layers' dense products, the vocabulary's head on what is predicted."""
    d, f = model.hidden, model.feed_forward
    layers = model.layers * (8 * d * d + 4 * d * f)
    if isinstance(config, FinetuneConfig):
        return 3.0 * layers
    predicted = 1.0 if model.causal else config.masking.rate
    return 3.0 * (layers + predicted * 2 * d * (model.vocab_size or USUAL_VOCAB_SIZE))


class Results:
    """results.jsonl beside a sweep."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / RESULTS

    def read(self) -> list[dict[str, Any]]:
        """All lines."""
        return workdir.read_lines(self.path) if self.path.exists() else []

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Appends those that are not there yet."""

        def key(line: dict[str, Any]) -> tuple:
            return line["digest"], line.get("scale"), line.get("seed")

        there = set(map(key, self.read()))
        new = [line for line in lines if key(line) not in there]
        if new:
            with files.one_line_errors(f"cannot write {self.path}"), open(self.path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in new))


# What it costs


class Cost(NamedTuple):
    """An estimate.

    Attributes:
        flops: of training; 0 where it is not training.
        seconds: None where there is nothing to tell it by.
    """

    flops: float
    seconds: float | None


def cost(point: Point, given: Given, results: Sequence[dict[str, Any]], speed: float) -> Cost:
    """What a point will cost, roughly: its matrix products at a speed.

    A pretraining run's are known. A fine-tuning run's follow from the bytes of its training file.

    Args:
        point: not yet run.
        given: for the data's folder.
        results: of the same sweep, measured before: the same kind of thing takes as long.
        speed: FLOP/s of what will run it; 0 takes what the results say, else a guess for this CPU.
    """
    before = [r for r in results if r["command"].split()[1:2] == [point.verb]]
    if point.verb not in _LAUNCHED:
        times = [r["wall_seconds"] for r in before]
        return Cost(0.0, statistics.median(times) if times else None)
    kind = Config if point.verb == "pretrain" else FinetuneConfig
    config, options = _read(point, kind)
    model, seeds = config.model, int(options.get("--seeds", 1))
    for start in point.needs:
        if kind is FinetuneConfig and start.verb == "pretrain":
            model = _read(start, Config)[0].model
    if kind is Config:
        ends = [0, *config_lib.phase_ends(config)]
        rows = [part for part in point.needs if part.verb == "prepare"]
        model.vocab_size = model.vocab_size or _vocab_size(rows)
        tokens = sum(
            (end - begin)
            * (phase.batch_size or config.batch_size)
            * (phase.tokens or _tokens_of(rows[i] if i < len(rows) else None))
            for i, (begin, end, phase) in enumerate(
                zip(ends, ends[1:], config.phases, strict=False)
            )
        )
    else:
        tokens = _training_bytes(config, given) / _BYTES_A_TOKEN * config.epochs * seeds
    flops = _flops_a_token(model, config) * tokens
    measured = [r["flops"] / r["step_seconds"] for r in before if r.get("step_seconds")]
    speed = speed or (statistics.median(measured) if measured else _core_flops())
    return Cost(flops, flops / speed if flops else None)


def _read(point: Point, kind: type = Config) -> tuple[Any, dict[str, str]]:
    """A command's config, and its other options by name."""
    parts = ["" if isinstance(part, Point) else str(part) for part in point.command[1:]]
    settings, rest = config_lib.split(parts)
    return (config_lib.load(settings, kind) if settings else None), dict(itertools.pairwise(rest))


def _vocab_size(rows: Sequence[Point]) -> int:
    """Of the vocabulary that rows are made with, 0 if nothing tells it."""
    vocabs = [part for each in rows[:1] for part in each.needs if part.verb == "vocab"]
    return int(_read(vocabs[0])[1].get("--size", USUAL_VOCAB_SIZE)) if vocabs else 0


def _tokens_of(rows: Point | None) -> int:
    return int(_read(rows)[1].get("--tokens", 128)) if rows else 128


def _training_bytes(config: FinetuneConfig, given: Given) -> float:
    """Of text in a training file; 0 where it is not here."""
    paths = [pathlib.Path(config.task.train)] if config.task.train else []
    if not paths and config.task.name in glue.TASKS:
        folder = glue.TASKS[config.task.name].folder
        paths = sorted((given.data / "glue" / folder).glob("train.tsv*"))
    return sum(
        path.stat().st_size * (_COMPRESSION if path.suffix in SUFFIXES else 1)
        for path in paths
        if path.is_file()
    )


def _core_flops() -> float:
    return _CORE_FLOPS * (os.cpu_count() or 1)


def duration(seconds: float | None) -> str:
    """For people."""
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def describe(sweep: Sweep, runs: pathlib.Path, engine: Engine, speed: float = 0.0) -> str:
    """What `--dry-run` prints: every point, what it would run and what that may cost."""
    results = Results(sweep.path.parent).read()
    places = {p.name: Place(p, runs, sweep.given.data) for p in sweep.points}
    lines, total, unknown = [], 0.0, 0
    for point in sweep.points:
        place = places[point.name]
        if place.is_done:
            lines.append(f"{point.name}: done, {place.folder}")
            continue
        told = cost(point, sweep.given, results, speed)
        unknown += told.seconds is None
        total += told.seconds or 0
        flops = f", {told.flops:.2g} FLOP" if told.flops else ""
        lines.append(f"{point.name}: about {duration(told.seconds)}{flops}")
        lines.append(f"  {shlex.join(engine.command(point, places))}")
    left = sum(not place.is_done for place in places.values())
    rest = f", and {unknown} of which nothing is known" if unknown else ""
    lines.append(
        f"{len(sweep.points)} points, {left} to run: about {duration(total)} one after the other{rest}"
    )
    return "\n".join(lines)


# The table that is shown


def note_of(place: Place, now: float) -> dict[str, str]:
    """What a running point says of itself: step, loss, time left."""
    runs = sorted(place.out.glob("seed_*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    path = runs[-1] if runs else place.out / "metrics.jsonl"
    if not path.exists() or not (path.parent / "config.json").exists():
        return {"note": place.last_words()[-60:]}
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - 4096, 0))
        lines = file.read().decode(errors="replace").splitlines()
    lines = [line for line in lines if line.startswith("{") and line.endswith("}")]
    if not lines:
        return {}
    line = json.loads(lines[-1])
    steps = json.loads((path.parent / "config.json").read_text())["config"]["steps"]
    starts = path.parent / "starts.jsonl"
    done = line["step"] - workdir.read_lines(starts)[-1]["step"]
    began = starts.stat().st_mtime
    left = (steps - line["step"]) * (now - began) / done if done > 0 else None
    loss = next((v for k, v in line.items() if k.endswith("loss")), None)
    return {
        "step": f"{line['step']:,}/{steps:,}",
        "loss": "" if loss is None else f"{loss:.3f}",
        "left": duration(left) if left is not None else "",
        "note": path.parent.name if runs else "",
    }


_STYLES = {"running": "bold", "done": "green", "failed": "red", "blocked": "red", "stopped": "yellow"}  # fmt: skip


class Display:
    """A live table in a terminal; in a log a line whenever a point changes."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._live = scheduler, None
        self._before: dict[str, str] = {}
        self._drawn = 0.0

    def __enter__(self) -> "Display":
        self._before = dict(self._scheduler.state)
        counts = [state for state in self._before.values() if state == "done"]
        if counts:
            print(f"{len(counts)} of {len(self._before)} points are done already", file=sys.stderr)
        if sys.stderr.isatty():
            from rich import console, live

            self._live = live.Live(
                self._table(), console=console.Console(stderr=True), auto_refresh=False
            )
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def show(self) -> None:
        """Looks again."""
        state = self._scheduler.state
        if self._live is None:
            for name, now in state.items():
                if now != self._before.get(name, "waiting"):
                    place = self._scheduler.places[name]
                    more = f" ({place.log})" if now in ("running", "failed") else ""
                    print(f"{name}: {now}{more}", file=sys.stderr, flush=True)
        elif time.monotonic() - self._drawn > 1 or state != self._before:
            self._drawn = time.monotonic()
            self._live.update(self._table(), refresh=True)
        self._before = dict(state)

    def _table(self) -> Any:
        from rich import table, text

        shown = table.Table(box=None, pad_edge=False)
        for title, side in (
            ("point", "left"), ("state", "left"), ("step", "right"), ("loss", "right"),
            ("left", "right"), ("", "left"),
        ):  # fmt: skip
            shown.add_column(title, justify=side, no_wrap=True)
        states = self._scheduler.state
        # What is over comes first and is cut where the terminal is too small for all.
        most = max((os.get_terminal_size(2).lines if sys.stderr.isatty() else 100) - 4, 5)
        names = sorted(states, key=lambda name: states[name] != "done")
        hidden = max(len(names) - most, 0)
        if hidden:
            shown.add_row(f"… {hidden} more")
        now = time.time()
        for name in names[hidden:]:
            running = states[name] == "running"
            note = note_of(self._scheduler.places[name], now) if running else {}
            if states[name] == "failed":
                note = {"note": self._scheduler.places[name].last_words()[-80:]}
            cells = [note.get(key, "") for key in ("step", "loss", "left", "note")]
            shown.add_row(name, text.Text(states[name], _STYLES.get(states[name], "dim")), *cells)
        return shown


def run(
    sweep: Sweep,
    runs: str | os.PathLike,
    engine: Engine,
    *,
    resubmit: bool = False,
    trials: int = 0,
) -> int:
    """Runs all points of a sweep that are not done, or a search, and records what came of them.

    Args:
        sweep: as `load` gives it.
        runs: the folder of all sweeps' points.
        engine: what runs them.
        resubmit: queue jobs again that were handed over and have not ended.
        trials: of a search with the sweep's `get_trial(given, trial)`, in all.

    Returns:
        0; 1 if something failed; 75 if it was stopped by a signal.

    Raises:
        UserError: another sweep of the same folder writes its results; a search without get_trial.
    """
    runs, given = pathlib.Path(runs).absolute(), sweep.given
    results = Results(sweep.path.parent)

    def done(place: Place) -> None:
        try:
            results.add(lines_of(place, given))
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"cannot read what {place.point.name} has left in {place.out}: {error!r}; remove "
                f"{place.folder} to run it again"
            ) from error

    scheduler = Scheduler(runs, given, engine, resubmit, done)
    with files.one_line_errors(f"cannot use the folder {runs}"):
        runs.mkdir(parents=True, exist_ok=True)
    search = _Search(sweep, trials, engine.jobs) if trials else None
    if not search:
        scheduler.add(sweep.points)
    with contextlib.ExitStack() as stack:
        stack.callback(scheduler.stop)  # whatever comes, nothing of ours goes on unwatched
        received = stack.enter_context(launch.signals())
        display = stack.enter_context(Display(scheduler))
        told = 0
        while True:
            if search:
                search.look(scheduler)
            scheduler.look()
            display.show()
            if len(received) > told:
                told = len(received)
                scheduler.stop() if told == 1 else scheduler.kill()
            if scheduler.is_over and not (search and search.wants_more and not told):
                break
            time.sleep(_LOOK_SECONDS)
    return _conclude(scheduler, bool(received), search)


def _conclude(scheduler: Scheduler, interrupted: bool, search: "_Search | None") -> int:
    by = {state: [n for n, s in scheduler.state.items() if s == state] for state in _STYLES}
    for name in by["failed"]:
        place = scheduler.places[name]
        print(f"{name} failed: {place.last_words()} ({place.log})", file=sys.stderr)
    if by["blocked"]:
        print(f"not run because of that: {', '.join(by['blocked'])}", file=sys.stderr)
    print(f"{len(by['done'])} of {len(scheduler.state)} points done", file=sys.stderr)
    if search:
        print(search.describe())
    if interrupted:
        print("stopped; the same command goes on", file=sys.stderr)
        return launch.STOPPED
    return 1 if by["failed"] else 0


class _Search:
    """Optuna's trials as points; the study is beside the sweep and outlives everything."""

    def __init__(self, sweep: Sweep, trials: int, at_a_time: int):
        get_trial, self._objective = (
            getattr(sweep.module, name, None) for name in ("get_trial", "OBJECTIVE")
        )
        if not get_trial or not self._objective:
            raise UserError(
                f"{sweep.path} has nothing to search: it needs get_trial(given, trial) and "
                'OBJECTIVE, such as "dev.accuracy" ("-heldout loss" is made small)'
            )
        try:
            import optuna
        except ImportError:
            raise UserError("--search needs optuna: pip install 'bert-jax[search]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._get, self._sweep, self._trials, self._most = get_trial, sweep, trials, at_a_time
        self._states = optuna.trial.TrialState
        storage = optuna.storages.journal.JournalFileBackend(
            str(sweep.path.parent / "study.journal")
        )
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(storage),
            study_name=f"{sweep.path.parent.name}-{sweep.given.scale}",
            direction="minimize" if self._objective.startswith("-") else "maximize",
            sampler=optuna.samplers.TPESampler(seed=0),
            load_if_exists=True,
        )
        # Trials whose sweep was killed: asked again with the same values, so that their points go on.
        for trial in self._study.get_trials(states=(self._states.RUNNING,)):
            self._study.tell(trial.number, state=self._states.FAIL)
            self._study.enqueue_trial(trial.params)
        self._open: dict[str, Any] = {}

    @property
    def wants_more(self) -> bool:
        """Whether there are trials to come."""
        over = (self._states.COMPLETE, self._states.FAIL)
        ended = [t for t in self._study.get_trials(deepcopy=False) if t.state in over]
        return sum(t.state is self._states.COMPLETE for t in ended) < self._trials and len(ended) < 3 * self._trials  # fmt: skip

    def look(self, scheduler: Scheduler) -> None:
        """Tells the study what has ended and asks it for more."""
        for name, trial in list(self._open.items()):
            state = scheduler.state[name]
            if state == "done":
                self._study.tell(trial, self._value(scheduler.places[name]))
            elif state in ("failed", "blocked"):
                self._study.tell(trial, state=self._states.FAIL)
            else:
                continue
            del self._open[name]
        complete = len(self._study.get_trials(states=(self._states.COMPLETE,), deepcopy=False))
        while len(self._open) < min(self._most, self._trials - complete) and self.wants_more:
            if scheduler.is_stopping:
                return
            trial = self._study.ask()
            point = self._get(self._sweep.given, trial)
            point = dataclasses.replace(point, name=f"trial_{trial.number}")
            point.facts.update(trial=trial.number, **trial.params)
            scheduler.add(
                p
                for p in ordered(self._sweep.path, [point], self._sweep.given.data)
                if p.name not in scheduler.places
            )
            self._open[point.name] = trial

    def _value(self, place: Place) -> float:
        found = [line["metrics"] for line in lines_of(place, self._sweep.given)]
        name = self._objective.removeprefix("-")
        if name not in found[0]:
            raise UserError(f"OBJECTIVE {name!r} is none of the metrics: {', '.join(found[0])}")
        return statistics.fmean(metrics[name] for metrics in found)

    def describe(self) -> str:
        """The best so far."""
        if not self._study.get_trials(states=(self._states.COMPLETE,)):
            return "no trial has come to its end"
        best = self._study.best_trial
        return f"best of {len(self._study.trials)}: {best.value:.4g} with {best.params}"


def select(sweep: Sweep, patterns: Sequence[str]) -> Sweep:
    """The points whose names match any of the patterns, and what they need.

    Raises:
        UserError: none does; lists what there are.
    """
    if not patterns:
        return sweep
    chosen = [p for p in sweep.points if any(fnmatch.fnmatch(p.name, each) for each in patterns)]
    if not chosen:
        names = ", ".join(point.name for point in sweep.points)
        raise UserError(f"no point is called {' or '.join(patterns)}; there are: {names}")
    return sweep._replace(points=ordered(sweep.path, chosen, sweep.given.data))
