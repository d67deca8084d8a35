"""Results of points: the lines of results.jsonl."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import re
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from bert_jax.config import fields as fields_lib
from bert_jax.config.schema import FinetuneConfig
from bert_jax.data.rows import MANIFEST, read_manifest
from bert_jax.errors import UserError
from bert_jax.model.bert import init_params
from bert_jax.model.flops import parameter_count
from bert_jax.runs import workdir
from bert_jax.storage import files
from bert_jax.tools.report import curves
from bert_jax.tools.sweep.folders import PointRun
from bert_jax.tools.sweep.points import FOLDER_OPTION, RUNS, SweepArgs, without_data
from bert_jax.tools.sweep.scheduler import LAUNCHED

RESULTS = "results.jsonl"
_VERSIONS = ("bert-jax", "jax", "flax")
# Keys of every line, and further keys of training runs.
_KEYS = ("point", "scale", "facts", "command", "digest", "metrics", "wall_seconds")
_OF_A_RUN = ("seed", "real_tokens", "step_seconds", "flops", "devices", "cores", "load", "commit")
# Change only when the point runs again. Other keys, such as `processor`, can be those of the process that
# reads the results.
_EXECUTION = ("metrics", "wall_seconds", "attempts", "load")


def lines_of(point_run: PointRun, args: SweepArgs) -> list[dict[str, Any]]:
    """Return the results of a finished point: a line per seed of a training run, else one line."""
    point, attempts, last = point_run.point, point_run.attempts(), point_run.last_attempt
    common = {
        "point": point.name,
        "scale": args.scale,
        "facts": point.facts,
        "command": _shell_command(point_run, args.data),
        "digest": point_run.digest,
        "wall_seconds": round(sum(attempt["seconds"] for attempt in attempts), 1),
        "attempts": len(attempts),
        "load": last.get("load"),
        "cores": last.get("cores"),
        "processor": _processor(),
        **workdir.versions(_VERSIONS),
    }
    if point.verb not in LAUNCHED:
        path = point_run.files / "metrics.json"
        metrics = json.loads(path.read_text()) if path.exists() else _of_rows(point_run.files)
        return [{**common, "metrics": metrics, "commit": workdir.commit()}]
    out = point_run.files
    runs = sorted(out.glob("seed_*"), key=lambda p: int(p.name[5:])) or [out]
    lines = [{**common, **_of_run(run)} for run in runs]
    if last.get("on", "local") != "local":
        # Our own measurements are of this machine; the rest is from the run's files.
        steps = sum(line["step_seconds"] for line in lines)
        unknown = {"wall_seconds": round(steps, 1), "load": None, "cores": None, "processor": None}
        lines = [{**line, **unknown} for line in lines]
    return lines


def _processor() -> str:
    """Return the CPU's model name, or else the architecture."""
    names = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        names = re.findall(r"^model name\s*: (.+)$", file.read(), re.M)
    return names[0] if names else platform.machine()


def _of_rows(out: pathlib.Path) -> dict[str, Any]:
    if not (out / MANIFEST).exists():
        return {}
    manifest = read_manifest(out)
    return {"train_rows": manifest.train.rows, "heldout_rows": manifest.heldout.rows}


def _of_run(folder: pathlib.Path) -> dict[str, Any]:
    """Return settings, tokens, time and metrics of a workdir."""
    config = workdir.read_config(folder)
    speed = curves.read_speed(folder)
    clock = curves.clock(speed)
    start = workdir.read_steps(folder / "starts.jsonl")[-1]
    defaults = fields_lib.flatten(type(config)())
    # Paths are those of this machine; the command identifies what they refer to.
    changed = {
        key: value
        for key, value in fields_lib.flatten(config).items()
        if defaults.get(key) != value and not (isinstance(value, str) and "/" in value)
    }
    curve: dict[str, Any] = {}
    if isinstance(config, FinetuneConfig):
        last = json.loads((folder / "metrics.json").read_text())
        splits = {split: values for split, values in last.items() if isinstance(values, dict)}
        metrics = {f"{split}.{k}": v for split, values in splits.items() for k, v in values.items()}
    else:
        by_split: dict[str, list] = {"train": [], "heldout": []}
        for line in workdir.read_steps(folder / "metrics.jsonl"):
            by_split.setdefault(line["split"], []).append(line)
        train, heldout = by_split["train"], by_split["heldout"]
        last, prefix = (heldout[-1], "") if heldout else (train[-1], "train.")
        metrics = {f"{prefix}{k}": v for k, v in last.items() if k not in ("step", "split")}
        curve["curve"] = _curve(heldout, clock, workdir.read_best_by(folder)["best_by"])
    seconds = 3600 * np.diff(clock["hours"])
    flops = sum(line["flops_per_second"] * each for line, each in zip(speed, seconds, strict=True))
    # The key is traced, too: a key would start the accelerator that the runs of the sweep need.
    params = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    return {
        "seed": config.seed,
        "step": last["step"],
        "metrics": metrics,
        "step_seconds": round(float(seconds.sum()), 1),
        "real_tokens": round(clock["tokens"][-1]),
        "flops": float(flops),
        "parameters": parameter_count(params, config.model),
        "config": json.loads(json.dumps(changed, sort_keys=True, default=str)),
        "commit": start["commit"],
        "devices": start["devices"],
        **{name: start["versions"].get(name) for name in _VERSIONS},
        **curve,
    }


def _shell_command(point_run: PointRun, data: pathlib.Path) -> str:
    """Return a point's shell command, relative to the parent of `runs/`.

    The data folder is $BERT_JAX_DATA, and other absolute paths are shortened to their last two names.
    """
    point = point_run.point

    def quoted(text: str) -> str:
        text = without_data(text, data)
        if "$BERT_JAX_DATA" in text:
            return '"' + re.sub(r'(["`\\])', r"\\\1", text) + '"'
        return shlex.quote("/".join(pathlib.Path(text).parts[-2:]) if os.path.isabs(text) else text)

    words = point.words(lambda needed: _out(point_run.run_of(needed)), quoted)
    program = [] if point.verb == "python" else ["bert-jax"]
    return " ".join([*program, *words, FOLDER_OPTION[point.verb], _out(point_run)])


def _out(point_run: PointRun) -> str:
    """Return the path of a point's output with the default `--runs`, quoted."""
    return shlex.quote(f"{RUNS}/{point_run.folder.name}/{point_run.files.name}")


def _curve(heldout: list[dict], clock: dict[str, Float[np.ndarray, " n"]], loss: str) -> dict:
    """Return the held-out loss by step, real tokens and seconds of training (`curves.clock`)."""
    steps = [line["step"] for line in heldout]
    tokens, hours = (np.interp(steps, clock["step"], clock[axis]) for axis in ("tokens", "hours"))
    return {
        "step": steps,
        "real_tokens": [round(each) for each in tokens.tolist()],
        "seconds": [round(3600 * each, 1) for each in hours.tolist()],
        "loss": [line[loss] for line in heldout],
    }


def key(line: dict[str, Any]) -> tuple:
    """Return the unique key of a result."""
    return line["digest"], line.get("scale"), line.get("seed")


def verb(line: dict[str, Any]) -> str:
    """Return the verb of a result's command, "python" for a script."""
    return line["command"].removeprefix("bert-jax ").partition(" ")[0]


def current(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest results, without those of points that were run again with another command.

    Points with equal verb, scale and facts are the same; points without facts are all kept.
    """
    digests = {_point(line): line["digest"] for line in lines}
    last = {key(line): i for i, line in enumerate(lines)}
    return [
        line
        for i, line in enumerate(lines)
        if last[key(line)] == i and (not line["facts"] or digests[_point(line)] == line["digest"])
    ]


def _point(line: dict[str, Any]) -> tuple:
    return verb(line), line["scale"], json.dumps(line["facts"], sort_keys=True)


def _execution(line: dict[str, Any]) -> str:
    # Text, because NaN differs from itself.
    return json.dumps([line.get(name) for name in _EXECUTION], sort_keys=True)


class Results:
    """The results.jsonl of a sweep."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / RESULTS

    def read(self) -> list[dict[str, Any]]:
        """Return all lines, without an incomplete last one, as a kill leaves it."""
        lines = []
        texts = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        for number, text in enumerate(texts, 1):
            where = f"{self.path}, line {number}"
            try:
                line = json.loads(text)
            except ValueError:
                if not text.endswith(b"\n"):
                    break
                raise UserError(f"{where} is incomplete: remove it") from None
            values = line if isinstance(line, dict) else {}
            keys = (*_KEYS, *_OF_A_RUN) if "step" in values else _KEYS
            if missing := [name for name in keys if name not in values]:
                advice = "remove it; the sweep writes it again if the output of the point exists"
                raise UserError(f"{where} has no {missing[0]!r}, as of an older version: {advice}")
            lines.append(line)
        return lines

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines of new executions, and those of points whose command is current again."""
        with files.one_line_errors(f"cannot write {self.path}"), open(self.path, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may run this sweep
            written = self.read()
            known = {key(line): _execution(line) for line in current(written)}
            new = [line for line in lines if known.get(key(line)) != _execution(line)]
            if not new:
                return
            content = self.path.read_bytes()
            tail = content.rpartition(b"\n")[2]
            if tail and len(content.splitlines()) == len(written):  # only its newline is missing
                file.write(b"\n")
            else:
                file.truncate(len(content) - len(tail))
            file.write("".join(json.dumps(line) + "\n" for line in new).encode())
