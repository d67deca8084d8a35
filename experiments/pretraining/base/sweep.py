"""BERT-base (L12 H768 A12) on Wikipedia and novels in a quarter of an hour of one GPU.

Short runs (`probe`) choose the batch size and the learning rate, by their held-out loss after equal numbers
of tokens, and their speed the number of steps. So run the sweep twice: it has the other points once the
probes have results. run.sh does this within the limits of a lent machine.

The recipe is that of the small sizes (configs/pretrain.py): short rows first, 40% masking, no dropout, no
next-sentence prediction, AdamW with beta2 0.98. A tenth of the steps at T=512 trains the later positions.
"""

import os
import pathlib

import models

from bert_jax.tools.sweep.points import grid
from bert_jax.tools.sweep.results import Results, current

recipes = models.recipes
HERE = pathlib.Path(__file__).parent
# For a try on a CPU: another size, fewer seconds of training and tokens of a probe.
SIZE = os.environ.get("SIZE", "base")
SECONDS = float(os.environ.get("TRAIN_SECONDS", 780))
PROBE_TOKENS = int(os.environ.get("PROBE_TOKENS", 8_000_000))
LENGTHS = {16: 0.15, 128: 0.75, 512: 0.1}
PROBES = grid(batch_size=(256, 512), rate=(3e-4, 6e-4))  # rows of T=128
CHANGES = {
    "model.dropout": 0,
    "model.attention_dropout": 0,
    "model.next_sentence": "false",
    "masking.rate": 0.4,
    "optim.optimizer": "adamw",
    "optim.beta2": 0.98,
    "warmup_fraction": 0.0667,
    "evaluate_rows": 1_024,
}
# Fine-tuning: data options and changes, and the number of seeds. All of SQuAD, unlike the small scale.
_SQUAD = {
    "task.train": "{data}/squad/train-v1.1.rebuilt.json.gz",
    "task.dev": "{data}/squad/dev-v1.1.json.gz",
}
TASKS = {
    "SST-2": ({"epochs": 2}, 3),
    "CoLA": ({"epochs": 5}, 3),
    "RTE": ({"epochs": 5}, 3),
    "QNLI": ({"epochs": 3}, 3),
    "SQuAD": ({"epochs": 2, "task.tokens": 384, "task.stride_tokens": 128, **_SQUAD}, 1),
}


def _pretrain(args, name, lengths, batch_size, rate, steps, **facts):
    """Return a run; `batch_size` counts rows of T=128, and all lengths have as many tokens per step."""
    batch_sizes = [max(batch_size * 128 // tokens, 1) for tokens in lengths]
    changes = CHANGES | {f"phases[{i}].batch_size": size for i, size in enumerate(batch_sizes[:-1])}
    changes |= {"batch_size": batch_sizes[-1], "optim.learning_rate": rate, "steps": steps}
    changes |= {
        "evaluate_every_steps": max(steps // 20, 1),
        "checkpoint.every_steps": max(steps // 10, 1),
    }
    shares = [f"{tokens}={share}" for tokens, share in lengths.items()]
    config = ("--config", f"configs/pretrain.py:{','.join([SIZE, *shares])}")
    command = (*config, *recipes.settings(changes))
    return recipes.on_single_rows(args, name, command, lengths, **facts)


def _chosen(results):
    """Return the batch size, rate and steps that the probes choose, or None before they have results."""
    probes = [line for line in results if "probe" in line["facts"]]
    if len(probes) < len(PROBES):
        return None
    best = min(probes, key=lambda line: line["metrics"]["masked_lm_loss"])
    batch_size, rate = best["facts"]["probe"]["batch_size"], best["facts"]["probe"]["rate"]
    steps = SECONDS * best["real_tokens"] / best["step_seconds"] / (batch_size * 128)
    return batch_size, rate, round(steps)


def get_points(args):
    """Return the probes and, once they have results, the pretraining, its losses, and fine-tuning."""
    for facts in PROBES:
        name = f"probe, {facts['batch_size']} rows, {facts['rate']:.0e}"
        steps = max(PROBE_TOKENS // (facts["batch_size"] * 128), 1)
        yield _pretrain(args, name, {128: 1}, **facts, steps=steps, probe=facts)
    if chosen := _chosen(current(Results(HERE).read())):
        model = _pretrain(args, "base", LENGTHS, *chosen)
        yield from models.points(args, model)
        for task, (changes, seeds) in TASKS.items():
            changes = {"optim.learning_rate": 5e-5} | {
                key: str(value).format(data=args.data) for key, value in changes.items()
            }
            start = ["--init", model]
            yield recipes.finetuned(args._replace(seeds=seeds), "base", start, task, changes)


def _epochs(results, folder):
    """Return how many tokens a run has seen, and how many of them differ."""
    tokens = [line["real_tokens"] for line in results if line["facts"] == {"model": "base"}]
    pieces = [line["metrics"]["pieces"] for line in results if "pieces" in line["metrics"]]
    return [
        f"{seen / 1e6:.0f} million tokens, {seen / distinct:.0f} epochs of {distinct / 1e6:.0f} million."
        for seen, distinct in zip(tokens, pieces, strict=True)
    ] or ["not run"]


def get_blocks(results):
    """Return the blocks of the page."""
    names = {
        "SST-2": "",
        "CoLA": "",
        "RTE": "",
        "QNLI": "QNLI, 8,999 examples",
        "SQuAD": "SQuAD 1.1, F1",
    }
    specs = recipes.TASKS["small"]
    columns = {
        name or task: recipes.Column(
            specs[task].metric, {"task": task}, 1.0 if task == "SQuAD" else 100.0
        )
        for task, name in names.items()
    }
    table = recipes.Table({"base": {"model": "base"}}, columns, title="fine-tuned from")
    chosen = recipes.pages.Lines(_epochs)
    return models.blocks(results, HERE) | {"tasks": table, "epochs": chosen}
