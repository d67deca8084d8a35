"""Verbs that train and evaluate runs."""

import functools
import json
import os
import shutil
import textwrap
from typing import Any

from bert_jax.cli.common import (
    CHECKPOINT,
    CONFIG,
    START,
    WORKDIR,
    choice,
    flag,
    load_config,
    machine_output,
    number,
    open_start,
    option,
    print_next,
    repeatable,
    verb,
)
from bert_jax.errors import UserError

_RUN = (
    *CONFIG,
    WORKDIR,
    choice("--resume", "auto force", "force: resume even if the config differs from the run's"),
    option(
        "--teacher",
        "DIR",
        "distill a run, an imported checkpoint, or a Hugging Face folder or name",
    ),
    flag("--json", "print metrics as JSON lines to standard output, all else to standard error"),
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


@verb(
    option("name", "NAME[:ARG]", "a config, as for --config; none shows the defaults", nargs="?"),
    flag(
        "--all", "show all settings, not only those that are often set or that the config changes"
    ),
    flag("--json", "print one JSON line per setting"),
)
def _config(options) -> None:
    """Show the settings of a config, or of all runs, with their values and meanings.

    bert-jax config mini,128
    bert-jax config glue:rte --all
    bert-jax config --all | grep learning_rate
    """
    from bert_jax.config import flags, listing
    from bert_jax.config.schema import TrainConfig

    def chosen(setting: listing.Setting) -> bool:
        return options.all or setting.key in listing.USUAL or setting.value != setting.default

    groups = listing.defaults(chosen)
    if options.name:
        groups = listing.groups_of(flags.load([f"--config={options.name}"], TrainConfig), chosen)
    wrap = functools.partial(textwrap.fill, width=min(shutil.get_terminal_size().columns, 100))
    for group in groups:
        if not options.json:
            print(wrap(f"{group.key}: {group.help}"))
        for setting in group.settings:
            key, value, default, text = setting
            if options.json:
                print(json.dumps(setting._asdict(), ensure_ascii=False))
                continue
            print(f"  --config.{key}={value}" + f"  (default {default!r})" * (value != default))
            if text:
                print(wrap(text, initial_indent=" " * 6, subsequent_indent=" " * 6))
        if not options.json:
            print()
    if not (options.all or options.json):
        print(f"all settings: bert-jax config {f'{options.name} ' * bool(options.name)}--all")


@verb(
    repeatable("--rows", "DIR", "rows of each phase, in order; DIR=0.7,DIR=0.3 mixes folders"),
    *START,
    option(
        "--cache",
        "DIR",
        "folder for copies of rows on object storage (default ~/.cache/bert_jax_storage)",
    ),
    *_RUN,
)
def _pretrain(options) -> None:
    r"""Pretrain a model on rows.

    bert-jax pretrain --config configs/pretrain.py:mini,128 --rows rows128 --workdir runs/mini \
      --config.steps=20000 --config.optim.learning_rate=5e-4
    bert-jax pretrain --config continued:128 --init bert-base-uncased --rows rows128 --workdir runs/mine

    Run the same command again to resume from the newest checkpoint.
    exit status: 0 done, 2 user error, 75 state saved after a signal
    """
    if options.cache:
        os.environ["BERT_JAX_STORAGE_CACHE"] = options.cache
    config = _start(options)

    from bert_jax.objectives import pretraining
    from bert_jax.tools import profile
    from bert_jax.train import train

    config, start = open_start(config, options)
    config, vocabulary, data, phases = pretraining.make_phases(
        config, start=start, folder=options.workdir
    )
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


@verb(
    option(
        "--init",
        "DIR",
        "a run, a checkpoint, a Hugging Face folder or name, or none for random parameters",
        required=True,
    ),
    CHECKPOINT,
    option("--data", "DIR", "set config.task.data: folder of a benchmark, or tfds"),
    option("--vocab", "DIR", "vocabulary, for --init none", default=""),
    number("--seeds", 1, "train N seeds and report mean, standard deviation and best", least=1),
    *_RUN,
)
def _finetune(options) -> None:
    r"""Fine-tune a checkpoint on a task.

    bert-jax finetune --config configs/glue.py:rte --data GLUE --init runs/base --workdir runs/rte
    bert-jax finetune --config configs/table.py --config.task.train=train.csv \
      --config.task.dev=dev.csv --init bert-base-uncased --workdir runs/mine --seeds 5

    Run the same command again to resume from the newest checkpoint.
    exit status: as for pretrain
    """
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


@verb(
    WORKDIR,
    option("--rows", "DIR", "rows (default: those of the last phase)"),
    CHECKPOINT,
    flag("--all", "use all held-out rows, not only the run's subset"),
    flag("--json", "print JSON"),
    platform="",
)
def _evaluate(options) -> None:
    """Evaluate a run on held-out data.

    bert-jax evaluate --workdir runs/mini --rows rows128
    bert-jax evaluate --workdir runs/rte
    """
    from bert_jax.config.schema import FinetuneConfig
    from bert_jax.runs import workdir

    if isinstance(workdir.read_config(options.workdir), FinetuneConfig):
        from bert_jax.inference import predict

        if options.rows or options.all:
            raise UserError(
                f"--rows and --all: {options.workdir} is not a pretraining run: leave them out; a fine-tuning "
                "run is evaluated on all data of its task"
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
            if name != "real_fraction":  # of the tokens, for the speed
                print(f"  {name:24} {value:.4f}")
