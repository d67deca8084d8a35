"""Verbs that train and evaluate runs."""

import json
import os
from typing import Any

from bert_jax.cli.common import (
    Parser,
    Verbs,
    add_checkpoint_option,
    add_config,
    add_start,
    load_config,
    machine_output,
    open_start,
    print_next,
)
from bert_jax.errors import UserError


def _add_run(sub: Parser) -> None:
    add_config(sub)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    sub.add_argument(
        "--resume",
        choices=("auto", "force"),
        default="auto",
        help="force: resume even if the config differs from the run's",
    )
    sub.add_argument(
        "--teacher",
        metavar="DIR",
        help="distill this model: set config.distill.teacher to a run, an imported checkpoint, or a "
        "Hugging Face folder or name",
    )
    sub.flag(
        "--json", "print metrics as JSON lines to standard output, and all else to standard error"
    )


def _start(options) -> Any:
    """Start JAX and the processes of a run, and return its config."""
    config = load_config(options)

    from bert_jax.runtime import device, distributed

    distributed.start()
    device.start(config.platform, deterministic=config.deterministic)
    # Before a model is opened, at which Orbax waits for all processes.
    distributed.check_same_on_all_processes({"--workdir": options.workdir, "--init": options.init})
    return config


def add_pretrain(verbs: Verbs) -> None:
    """Add `bert-jax pretrain`."""
    sub = verbs.add(
        "pretrain",
        _pretrain,
        "pretrain a model on rows",
        "  bert-jax pretrain --config configs/pretrain.py:mini,128 --rows rows128 --workdir runs/mini \\\n"
        "    --config.steps=20000 --config.optim.learning_rate=5e-4\n"
        "  bert-jax pretrain --config continued:128 --init bert-base-uncased --rows rows128 --workdir runs/mine\n\n"
        "Run the same command again to resume from the newest checkpoint.\n"
        "exit status: 0 done, 2 user error, 75 state saved after a signal",
        takes_config=True,
    )
    sub.repeatable("--rows", "DIR", "rows of each phase, in order")
    add_start(sub)
    sub.add_argument(
        "--cache",
        metavar="DIR",
        help="folder for copies of rows on object storage (default ~/.cache/bert_jax_storage)",
    )
    _add_run(sub)


def _pretrain(options) -> None:
    if options.cache:
        os.environ["BERT_JAX_STORAGE_CACHE"] = options.cache
    config = _start(options)

    from bert_jax.objectives import pretraining
    from bert_jax.tools import profile
    from bert_jax.train import train

    config, start = open_start(config, options)
    config, vocabulary, data, phases = pretraining.make_phases(config, start=start)
    with machine_output(options):
        train(
            config,
            vocabulary,
            data,
            phases,
            options.workdir,
            force=options.resume == "force",
            start=start.params if start else None,
            summarize_trace=profile.summarize,
            save_on_signal=True,
        )
    if config.model.masked_lm and not config.model.causal:
        print_next(options, ["fill-mask", "--init", options.workdir, "The [MASK] of the day."])


def add_finetune(verbs: Verbs) -> None:
    """Add `bert-jax finetune`."""
    sub = verbs.add(
        "finetune",
        _finetune,
        "fine-tune a checkpoint on a task",
        "  bert-jax finetune --config configs/glue.py:rte --data GLUE --init runs/base --workdir runs/rte\n"
        "  bert-jax finetune --config configs/table.py --config.task.train=train.csv \\\n"
        "    --config.task.dev=dev.csv --init bert-base-uncased --workdir runs/mine --seeds 5\n\n"
        "Run the same command again to resume from the newest checkpoint.\n"
        "exit status: as for pretrain",
        takes_config=True,
    )
    sub.add_argument(
        "--init",
        required=True,
        metavar="DIR",
        help="a run, an imported checkpoint, or a Hugging Face folder or name; "
        "none: random parameters",
    )
    add_checkpoint_option(sub)
    sub.add_argument(
        "--data", metavar="DIR", help="set config.task.data: folder of a benchmark, or tfds"
    )
    sub.add_argument("--vocab", default="", metavar="DIR", help="vocabulary, for --init none")
    sub.number("--seeds", 1, "train N seeds and report mean, standard deviation and best")
    _add_run(sub)


def _finetune(options) -> None:
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: it must be 1 or more")
    config = _start(options)

    from bert_jax.config import flags
    from bert_jax.inference import predict
    from bert_jax.tools import profile
    from bert_jax.train import finetune

    with machine_output(options):
        summary = finetune(
            config,
            options.init,
            options.workdir,
            seeds=options.seeds,
            vocab=options.vocab,
            which=options.checkpoint,
            force=options.resume == "force",
            summarize_trace=profile.summarize,
            save_on_signal=True,
            keys=flags.keys(options.config),
        )
    print(json.dumps(summary) if options.json else predict.format_metrics(summary))
    folder = options.workdir if options.seeds == 1 else f"{options.workdir}/seed_{config.seed}"
    if config.task.kind == "pairs":
        print_next(options, ["embed", "--init", folder, "--out", "vectors.npy", "FILE"])
    else:
        print_next(options, ["predict", "--workdir", folder, "--out", "predictions", "FILE"])


def add_evaluate(verbs: Verbs) -> None:
    """Add `bert-jax evaluate`."""
    sub = verbs.add(
        "evaluate",
        _evaluate,
        "evaluate a run on held-out data",
        "  bert-jax evaluate --workdir runs/mini --rows rows128\n"
        "  bert-jax evaluate --workdir runs/rte",
        platform="",
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    sub.add_argument("--rows", metavar="DIR", help="rows (default: those of the last phase)")
    add_checkpoint_option(sub)
    sub.flag("--all", "use all held-out rows, not only the run's subset")
    sub.flag("--json", "print JSON")


def _evaluate(options) -> None:
    from bert_jax.config.schema import FinetuneConfig
    from bert_jax.runs import workdir

    if isinstance(workdir.read_config(options.workdir), FinetuneConfig):
        from bert_jax.inference import predict

        if options.rows or options.all:
            raise UserError(
                f"--rows and --all: only for pretraining runs; {options.workdir} is a fine-tuning "
                "run, which is evaluated on all data of its task"
            )

        summary = predict.evaluate_run(options.workdir, which=options.checkpoint)
        print(json.dumps(summary) if options.json else predict.format_metrics(summary))
        return

    from bert_jax.training.evaluate import evaluate_workdir

    step, metrics = evaluate_workdir(options.workdir, options.rows, options.checkpoint, options.all)
    if options.json:
        print(json.dumps({"step": step, **metrics}))
    else:
        print(f"step {step:,} of {options.workdir}, held-out")
        for name, value in metrics.items():
            print(f"  {name:24} {value:.4f}")
