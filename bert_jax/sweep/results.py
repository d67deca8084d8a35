"""What came of points: the lines of results.jsonl."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shlex
from collections.abc import Sequence
from typing import Any

from bert_jax import config as config_lib
from bert_jax import files, workdir
from bert_jax.config import FinetuneConfig
from bert_jax.data.rows import MANIFEST, read_manifest
from bert_jax.data.workers import cores
from bert_jax.sweep.points import Given
from bert_jax.sweep.scheduler import LAUNCHED, Place

RESULTS = "results.jsonl"


def lines_of(place: Place, given: Given) -> list[dict[str, Any]]:
    """What a point that is done adds to the results: a line a seed, else one."""
    point, attempts = place.point, place.attempts()
    common = {
        "point": point.name,
        "scale": given.scale,
        "facts": point.facts,
        "command": shlex.join(["bert-jax", *map(_published, point.told(given.data))]),
        "digest": place.digest,
    }
    versions = {name: importlib.metadata.version(name) for name in ("bert-jax", "jax", "flax")}
    last = {
        "wall_seconds": round(sum(attempt["seconds"] for attempt in attempts), 1),
        "attempts": len(attempts),
        "load": attempts[-1].get("load") if attempts else None,
        "cores": cores(),
        "processor": platform.machine(),
        **versions,
    }  # fmt: skip
    if point.verb not in LAUNCHED:
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


def _published(part: str) -> str:
    """A path of this machine by its last two names: somebody's checkpoint, whose place tells nothing."""
    return "/".join(pathlib.Path(part).parts[-2:]) if os.path.isabs(part) else part


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


def key(line: dict[str, Any]) -> tuple:
    """What no two results have in common."""
    return line["digest"], line.get("scale"), line.get("seed")


class Results:
    """results.jsonl beside a sweep."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / RESULTS

    def read(self) -> list[dict[str, Any]]:
        """All lines."""
        return workdir.read_lines(self.path) if self.path.exists() else []

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Appends those that are not there yet."""
        there = set(map(key, self.read()))
        new = [line for line in lines if key(line) not in there]
        if new:
            with files.one_line_errors(f"cannot write {self.path}"), open(self.path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in new))
