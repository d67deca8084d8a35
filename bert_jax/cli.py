"""`bert-jax VERB`: arguments in, one function called. Imports wait until a verb needs them."""

import argparse
import json
import os
import sys
import threading
from typing import NoReturn

from bert_jax.errors import UserError

EXIT_USER_ERROR = 2
# preflight: the run does not fit the hardware. replay: the step came out differently.
EXIT_NO = 1
# BSD's EX_TEMPFAIL: stopped by a signal with everything saved; run the same command again.
EXIT_INTERRUPTED = 75


def console() -> None:
    """The `bert-jax` command: `main`, then out, without what libraries say on their way."""
    _quieten()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == EXIT_USER_ERROR:
        if "bert_jax.distributed" in sys.modules:
            sys.modules["bert_jax.distributed"].leave()
        os._exit(status)  # exit handlers would try to write once more and print tracebacks
    sys.exit(status)


def _quieten() -> None:
    """Keeps libraries' threads from printing tracebacks about a full disk that `main` reports."""
    in_thread, anywhere, unraisable = threading.excepthook, sys.excepthook, sys.unraisablehook

    def late(kind, error) -> bool:
        """TensorStore's callbacks, when they come after the save that waited for them has failed."""
        return kind is RuntimeError and str(error) == "Event loop is closed"

    def quieter(hook, unimportant):
        return lambda failure: None if unimportant(failure) else hook(failure)

    threading.excepthook = quieter(in_thread, lambda f: issubclass(f.exc_type, OSError))
    # C++ reports them to one of these two, by TensorStore's version.
    sys.unraisablehook = quieter(unraisable, lambda f: late(f.exc_type, f.exc_value))
    sys.excepthook = lambda *failure: None if late(*failure[:2]) else anywhere(*failure)


def main(arguments: list[str] | None = None) -> int:
    """Runs a verb and returns the exit status: 0, 2 for a user's error, 75 for saved and stopped.

    1 is preflight's and replay's: it does not fit, it is not the same.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    command = []
    if arguments[:1] == ["launch"] and "--" in arguments:  # what follows is another command
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    from bert_jax.config import split

    config, rest = split(arguments)
    for argument in rest:
        if argument.endswith("=--"):  # of which Python's argparse makes a list
            _parser().error(f"{argument}: a value cannot be --")
    options = _parser().parse_args(rest)
    if config and not getattr(options, "takes_config", False):
        _parser().error(f"{options.verb} takes no --config")
    options.config = config
    if options.verb == "launch":
        options.command = command
    try:
        return options.run(options) or 0
    except UserError as error:
        print(f"bert-jax {options.verb}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"bert-jax {options.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0


class _Parser(argparse.ArgumentParser):
    """Its errors quote what was given as ours do."""

    def error(self, message: str) -> NoReturn:
        super().error(str(UserError(message)))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bert-jax",
        description="BERT in JAX, end to end: text, vocabulary, rows, pretraining, fine-tuning, checkpoints.",
        epilog="`bert-jax VERB --help` explains a verb and shows an example.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name, run, summary, example, takes_config=False):
        sub = verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, takes_config=takes_config)
        return sub

    sources_help = (
        "text: a file, folder or glob, optionally KIND:… (google, books, wikiextractor, mediawiki, "
        "jsonl, parquet, tfds:NAME/CONFIG) and …@WEIGHT; plain, .gz, .bz2, .xz or .zst"
    )
    case_help = "case of the vocabulary (default: detected from it)"

    sub = verb(
        "vocab",
        _vocab,
        "train a WordPiece vocabulary on text",
        "  bert-jax vocab --out vocab --size 16384 books:novels/ 'wiki/*.gz'",
    )
    sub.add_argument("sources", nargs="+", metavar="SOURCE", help=sources_help)
    sub.add_argument("--out", required=True, metavar="DIR", help="folder for vocab.txt")
    sub.add_argument("--size", type=int, default=30522, help="entries (default %(default)s)")
    sub.add_argument("--cased", action="store_true", help="keep case and accents")
    sub.add_argument(
        "--min-frequency", type=int, default=2, help="rarer pieces are not merged (default 2)"
    )

    sub = verb(
        "prepare",
        _prepare,
        "turn text into shards of rows",
        "  bert-jax prepare --vocab vocab --out rows128 --tokens 128 --sequences 4 'wiki/*.gz'\n"
        "  bert-jax prepare --vocab vocab --out /nfs/rows128 --runner beam --beam runner=FlinkRunner \\\n"
        "    --beam flink_master=flink:8081 '/nfs/wiki/*.gz'",
    )
    sub.add_argument("sources", nargs="+", metavar="SOURCE", help=sources_help)
    sub.add_argument("--vocab", required=True, help="vocab.txt, or a folder that holds it")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder for the rows")
    sub.add_argument("--tokens", type=int, default=128, help="T, tokens a row (default 128)")
    sub.add_argument(
        "--sequences", type=int, default=1, help="most sequences packed into a row (default 1)"
    )
    sub.add_argument(
        "--pairs", choices=("nsp", "none"), default="nsp", help="sentence pairs (default) or not"
    )
    sub.add_argument("--passes", type=int, default=1, help="times over the text, pairs drawn anew")
    sub.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    sub.add_argument("--heldout-fraction", type=float, default=0.01, help="of the documents (0.01)")
    sub.add_argument("--short-fraction", type=float, default=0.1, help="shortened sequences (0.1)")
    case = sub.add_mutually_exclusive_group()
    case.add_argument(
        "--cased", action="store_const", const=False, dest="lowercase", help=case_help
    )
    case.add_argument(
        "--uncased", action="store_const", const=True, dest="lowercase", help=case_help
    )
    sub.add_argument("--language", default="en", help="for splitting sentences (default en)")
    sub.add_argument("--workers", type=int, default=None, help="processes (default: all cores)")
    sub.add_argument("--force", action="store_true", help="replace rows made with other settings")
    sub.add_argument(
        "--runner",
        choices=("local", "beam"),
        default="local",
        help="beam: an Apache Beam pipeline, the same bytes; its workers must reach the sources and "
        "--out by the same paths",
    )
    sub.add_argument(
        "--beam",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of Beam's, such as runner=FlinkRunner; may be repeated",
    )

    sub = verb(
        "pretrain",
        _pretrain,
        "pretrain a model on rows",
        "  bert-jax pretrain --config configs/pretrain.py:mini,128 --rows rows128 --workdir runs/mini \\\n"
        "    --config.steps=20000 --config.optim.learning_rate=5e-4\n\n"
        "Started again, the same command goes on from the newest checkpoint.\n"
        "exit status: 0 done, 2 a mistake told in one line, 75 stopped by a signal and saved",
        takes_config=True,
    )
    _config_arguments(sub)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    sub.add_argument(
        "--rows", action="append", default=[], metavar="DIR", help="rows; once a phase, in order"
    )
    sub.add_argument(
        "--resume",
        choices=("auto", "force"),
        default="auto",
        help="force: go on although the config differs from the run's",
    )

    sub = verb(
        "finetune",
        _finetune,
        "fine-tune a checkpoint on a task",
        "  bert-jax finetune --config configs/glue.py:rte --data GLUE --init runs/base --workdir runs/rte\n"
        "  bert-jax finetune --config configs/table.py --config.task.train=train.csv \\\n"
        "    --config.task.dev=dev.csv --init bert-base-uncased --workdir runs/mine --seeds 5\n\n"
        "Started again, the same command goes on from the newest checkpoint.\n"
        "exit status: as pretrain's",
        takes_config=True,
    )
    _config_arguments(sub)
    sub.add_argument(
        "--init",
        required=True,
        metavar="DIR",
        help="a run, an imported checkpoint, or a Hugging Face folder or name; none: random weights",
    )
    _which_argument(sub)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    sub.add_argument("--data", help="sets config.task.data: a benchmark's folder, or tfds")
    sub.add_argument("--vocab", default="", metavar="DIR", help="vocabulary, for --init none")
    sub.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="run N seeds; mean, deviation, best"
    )
    sub.add_argument(
        "--resume",
        choices=("auto", "force"),
        default="auto",
        help="force: go on although the config differs from the run's",
    )

    sub = verb(
        "predict",
        _predict,
        "run a fine-tuned model on new data",
        "  bert-jax predict --workdir runs/mine --out predictions new.csv\n"
        "  cat texts.txt | bert-jax predict --workdir runs/mine --out predictions -",
    )
    sub.add_argument("source", nargs="?", default="-", metavar="FILE", help="- (default): lines")
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    _which_argument(sub)
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the predictions")

    sub = verb(
        "score",
        _score,
        "score anyone's predictions as the benchmark's own program does",
        "  bert-jax score squad1 dev-v1.1.json predictions.json\n"
        "  bert-jax score glue:rte RTE/dev.tsv RTE.tsv\n"
        "  bert-jax score conll dev.txt predictions.conll",
    )
    sub.add_argument("benchmark", help="squad1, squad2, glue:TASK or conll")
    sub.add_argument("data", metavar="DATA", help="the answers")
    sub.add_argument("predictions", metavar="PREDICTIONS")
    sub.add_argument("--null-odds", metavar="FILE", help="squad2: null_odds.json")

    sub = verb(
        "glue-zip",
        _glue_zip,
        "collect predictions for GLUE's test sets into the zip that its server takes",
        "  bert-jax glue-zip --out glue.zip runs/cola runs/sst2 runs/mnli",
    )
    sub.add_argument("folders", nargs="+", metavar="DIR", help="runs, or what predict wrote")
    sub.add_argument("--out", required=True, metavar="FILE", help="the zip")

    sub = verb(
        "evaluate",
        _evaluate,
        "measure a run again on held-out data",
        "  bert-jax evaluate --workdir runs/mini --rows rows128\n"
        "  bert-jax evaluate --workdir runs/rte",
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    sub.add_argument("--rows", metavar="DIR", help="rows (default: those of its last phase)")
    _which_argument(sub)
    sub.add_argument("--all", action="store_true", help="all held-out rows, not the run's choice")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = verb(
        "replay",
        _replay,
        "compute a step that went wrong again, from what a run wrote down of it",
        "  bert-jax replay runs/mini\n  bert-jax replay runs/mini --step 4711 --json",
    )
    sub.add_argument("workdir", metavar="DIR", help="folder of the run")
    sub.add_argument("--step", type=int, help="of an incident (default: the first)")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = verb(
        "fill-mask",
        _fill_mask,
        "fill in the [MASK]s of a text",
        '  bert-jax fill-mask --init runs/mini "The capital of [MASK] is Paris."\n'
        "  cat texts.txt | bert-jax fill-mask --init runs/mini --json -",
    )
    sub.add_argument("texts", nargs="*", metavar="TEXT", help="texts; - or none reads lines")
    _model_argument(sub)
    sub.add_argument("--top", type=int, default=5, help="candidates a mask (default 5)")
    sub.add_argument("--json", action="store_true", help="print a JSON line a text")

    sub = verb(
        "attention",
        _attention,
        "show what attends to what in a text, in every layer and head",
        '  bert-jax attention --init models/base --text "The bank of the river"\n'
        '  bert-jax attention --init models/base --text "Who wrote it?" --text-b "She did." --rollout',
    )
    _model_argument(sub)
    sub.add_argument("--text", required=True, help="a text; [MASK] in it is the token")
    sub.add_argument("--text-b", metavar="TEXT", help="the second of a pair")
    sub.add_argument(
        "--rollout", action="store_true", help="also what comes through all layers up to each"
    )
    sub.add_argument(
        "--out", default="attention.html", metavar="FILE",
        help="a page (.html, default %(default)s), beside which a .png is put, or a picture (.png, "
        ".svg or .pdf), beside which a .html is put",
    )  # fmt: skip

    sub = verb(
        "import",
        _import,
        "make somebody else's checkpoint one of ours",
        "  bert-jax import bert-base-uncased --out models/base\n"
        "  bert-jax import uncased_L-12_H-768_A-12.zip --out models/google\n"
        "  bert-jax import all-MiniLM-L6-v2/ --out models/minilm",
    )
    sub.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face folder or name on its hub; a TensorFlow 1 release of Google's, as a "
        "folder or zip",
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    sub.add_argument("--revision", help="branch, tag or commit on the hub")
    sub.add_argument("--vocab", metavar="FILE", help="a vocab.txt instead of the source's own")
    case = sub.add_mutually_exclusive_group()
    case.add_argument(
        "--cased", action="store_const", const=False, dest="lowercase", help=case_help
    )
    case.add_argument(
        "--uncased", action="store_const", const=True, dest="lowercase", help=case_help
    )
    sub.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        choices=("pooler", "masked_lm", "next_sentence", "head", "tokens", "added_tokens"),
        help="go on without a part that the source says it has, with fewer tokens than embeddings, "
        "or without finding added tokens in texts; may be repeated",
    )
    sub.add_argument(
        "--allow-unexpected",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out tensors or modules of such names (* stands for anything); may be repeated",
    )

    sub = verb(
        "export",
        _export,
        "write a model for Hugging Face's transformers",
        "  bert-jax export --workdir runs/mini --out mini-hf\n"
        "  bert-jax export --workdir runs/mini --out mini-fill-mask --heads masked_lm",
    )
    _model_argument(sub)
    sub.add_argument("--out", required=True, metavar="FOLDER", help="new folder for the files")
    sub.add_argument(
        "--heads",
        default="all",
        choices=("all", "masked_lm", "none"),
        help="all (default), or those of a BertForMaskedLM or of a BertModel alone: transformers "
        "lists weights that the class it loads has no place for",
    )

    sub = verb(
        "embed",
        _embed,
        "turn texts into vectors",
        "  bert-jax embed --init models/minilm --out vectors.npy sentences.txt\n"
        "  bert-jax embed --init runs/mini --pooling none --layers last4 --out tokens.parquet a.jsonl\n"
        "  cat texts.txt | bert-jax embed --init runs/mini --out vectors.jsonl -",
    )
    sub.add_argument(
        "source", nargs="?", default="-", metavar="FILE",
        help="a text a line, .jsonl or .parquet, each also compressed; - (default) reads lines",
    )  # fmt: skip
    _model_argument(sub)
    sub.add_argument("--out", required=True, metavar="FILE", help=".npy, .jsonl or .parquet")
    sub.add_argument("--column", default="text", help="of .jsonl and .parquet (default text)")
    sub.add_argument(
        "--pooling",
        choices=("mean", "cls", "none"),
        help="a vector a text, the mean of its tokens' or [CLS]'s, or a vector a token "
        "(default: what an imported sentence encoder says, else mean)",
    )
    sub.add_argument(
        "--layers",
        metavar="WHICH",
        help="last (default), second-to-last, last4, all, embeddings, or numbers: 0 are the "
        "embeddings, --layers=-4,-1 two layers, one vector after the other",
    )
    sub.add_argument(
        "--weights", metavar="W,W,…", help="a number a layer: their weighted sum instead"
    )
    sub.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1"
    )
    sub.add_argument("--tokens", type=int, help="most tokens a text (default: all positions)")
    sub.add_argument(
        "--long",
        choices=("truncate", "window"),
        default="truncate",
        help="cut longer texts (default), or go over them in windows",
    )
    sub.add_argument("--overlap", type=int, metavar="TOKENS", help="of windows (default 64)")

    sub = verb(
        "launch",
        _launch,
        "run pretrain or finetune on many machines, or in several processes on this one",
        "  bert-jax launch --on tpu-vm --accelerator v5litepod-16 --zone us-west4-a --spot --bucket gs://mine \\\n"
        "    -- pretrain --config configs/pretrain.py:base,128 --rows /bucket/rows128 --workdir /bucket/runs/base\n"
        "  bert-jax launch --on slurm --nodes 4 --gpus 8 --extra=--partition=long -- pretrain …\n"
        "  bert-jax launch --on local --processes 2 --dry-run -- pretrain …\n\n"
        "An engine refuses options that are not its own. Each runs the command again after status 75.",
    )
    sub.add_argument(
        "--on", required=True, choices=("tpu-vm", "gke", "slurm", "sky", "local"), help="engine"
    )
    sub.add_argument("--dry-run", action="store_true", help="print what would be done, as a script")
    sub.add_argument("--name", help="of the job, slice or workload (default: the workdir's)")
    # No defaults here: they are the engines' own, and what is not given is not passed on.
    engine = sub.add_argument_group("of one engine or another", argument_default=argparse.SUPPRESS)
    engine.add_argument("--restarts", type=int, metavar="N", help="runs after the first, at most")
    engine.add_argument("--extra", action="append", metavar="ARG", help="for its command; repeated")
    engine.add_argument("--accelerator", metavar="KIND", help="v5litepod-16 (sky: H100:8)")
    engine.add_argument("--zone", help="such as us-west4-a (tpu-vm, gke)")
    engine.add_argument("--project", help="default: gcloud's (tpu-vm, gke)")
    engine.add_argument("--spot", action="store_true", help="machines that may be taken back")
    engine.add_argument("--bucket", metavar="gs://NAME", help="mounted at /bucket (tpu-vm, sky)")
    engine.add_argument("--runtime", help="a TPU VM's software (tpu-vm)")
    engine.add_argument("--keep", action="store_true", help="do not delete the slice (tpu-vm)")
    engine.add_argument("--cluster", help="GKE cluster (gke)")
    engine.add_argument("--slices", type=int, metavar="N", help="TPU slices (gke)")
    engine.add_argument("--image", help="container with bert-jax (gke; default: this checkout)")
    engine.add_argument("--nodes", type=int, metavar="N", help="machines (slurm, sky)")
    engine.add_argument("--gpus", type=int, metavar="N", help="a machine, a process each (slurm)")
    engine.add_argument("--processes", type=int, metavar="N", help="default 2 (local)")
    engine.add_argument("--devices", type=int, metavar="N", help="CPU devices a process (local)")

    sub = verb(
        "preflight",
        _preflight,
        "tell memory, time and cost of a run on hardware that is not here",
        "  bert-jax preflight --config configs/pretrain.py:large --topology v5p:4x4x4\n"
        "  bert-jax preflight --config configs/pretrain.py:base --topology v5e:4x4 --topology v6e:2x2 \\\n"
        "    --config.model.dtype=bfloat16 --dollars-per-chip-hour 1.20\n\n"
        "exit status: 0 it fits everywhere, 1 it does not, 2 a mistake told in one line",
        takes_config=True,
    )
    _config_arguments(sub)
    sub.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="KIND:SHAPE",
        help="v4, v5e, v5p or v6e with a slice's shape, v5e:16x16,slices=4, or h100:64; repeatable",
    )
    sub.add_argument("--rows", action="append", default=[], metavar="DIR", help="as pretrain's")
    sub.add_argument(
        "--sequences", type=int, default=1, help="most a row, where there are no rows (default 1)"
    )
    sub.add_argument("--dollars-per-chip-hour", type=float, metavar="X", help="tell the price")
    sub.add_argument("--json", action="store_true", help="print a JSON line a topology")

    sub = verb(
        "sweep",
        _sweep,
        "run all that an experiment is made of, here or elsewhere",
        "  bert-jax sweep experiments/table6_model_size --dry-run\n"
        "  bert-jax sweep experiments/table6_model_size --data ../data --jobs 2\n"
        "  bert-jax sweep experiments/table1_glue --scale paper --init bert-base-uncased \\\n"
        "    --on slurm --launch=--gpus=8 --jobs 20 --runs /shared/runs\n\n"
        "What is finished is skipped, what was interrupted goes on; a line a point goes to the\n"
        "experiment's results.jsonl. exit status: 0 all done, 1 something failed, 75 stopped",
    )
    sub.add_argument("file", metavar="SWEEP", help="a sweep.py, or the folder that holds it")
    sub.add_argument("--scale", choices=("small", "paper"), default="small", help="default small")
    sub.add_argument(
        "--data", default=os.environ.get("BERT_JAX_DATA", ""), metavar="DIR",
        help="texts and tasks (default: $BERT_JAX_DATA)",
    )  # fmt: skip
    sub.add_argument("--init", default="", metavar="DIR", help="what to fine-tune, if it asks")
    sub.add_argument("--seeds", type=int, default=0, metavar="N", help="default: the sweep's own")
    sub.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="points by name, with * and ?, and what they need; may be repeated",
    )  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="list the points, commands and costs")
    sub.add_argument(
        "--topology", metavar="KIND:SHAPE", help="with --dry-run: hardware to tell times for"
    )
    sub.add_argument("--jobs", type=int, default=1, metavar="N", help="points at a time (1)")
    sub.add_argument(
        "--runs", default="runs/sweeps", metavar="DIR",
        help="folder for all that is made, shared by sweeps (default %(default)s)",
    )  # fmt: skip
    sub.add_argument(
        "--search", type=int, default=0, metavar="N", help="N trials of its get_trial, by Optuna"
    )
    sub.add_argument(
        "--on", default="local", choices=("tpu-vm", "gke", "slurm", "sky", "local"),
        help="engine for pretrain and finetune (default local: processes here); it must see the data "
        "and --runs by the same paths",
    )  # fmt: skip
    sub.add_argument(
        "--launch",
        action="append",
        default=[],
        metavar="ARG",
        help="for `bert-jax launch`; repeated",
    )
    sub.add_argument("--resubmit", action="store_true", help="queue jobs again that have not ended")

    sub = verb(
        "report",
        _report,
        "make a page of runs beside each other, or write an experiment's tables",
        "  bert-jax report runs/mini runs/small --out report.html\n"
        "  bert-jax report runs/mini runs/small --out curves.png\n"
        "  bert-jax report experiments/table6_model_size",
    )
    sub.add_argument(
        "folders", nargs="+", metavar="DIR", help="runs, or experiments with a sweep.py"
    )
    sub.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="the page (default report.html), or the loss curve alone as .png, .svg or .pdf",
    )
    sub.add_argument(
        "--pictures",
        default="",
        metavar="DIR",
        help="every plot by step, as SVG and PDF, for a paper",
    )
    return parser


def _config_arguments(sub: argparse.ArgumentParser) -> None:
    # Taken out of the command line before argparse sees it; here for the help.
    group = sub.add_argument_group("config")
    group.add_argument("--config", metavar="FILE[:ARG]", help="a Python file with get_config")
    group.add_argument(
        "--config.KEY", metavar="VALUE", dest="_", help="changes a setting (bert_jax/config.py)"
    )


def _model_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--init",
        "--workdir",
        required=True,
        metavar="DIR",
        dest="init",
        help="a run, an imported checkpoint, or a Hugging Face folder or name",
    )
    _which_argument(sub)


def _which_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--checkpoint", default="best", help="best (default), latest, or a step", metavar="WHICH"
    )


def _vocab(options) -> None:
    from bert_jax.data import wordpiece

    vocabulary = wordpiece.train(
        options.sources,
        options.out,
        size=options.size,
        lowercase=not options.cased,
        min_frequency=options.min_frequency,
    )
    print(f"{options.out}: a vocabulary of {len(vocabulary):,} word pieces")


def _prepare(options) -> None:
    from bert_jax.data import prepare

    settings = vars(options).copy()
    for name in ("verb", "run", "takes_config", "config", "sources", "vocab", "out"):
        del settings[name]
    prepare.prepare(options.sources, options.vocab, options.out, **settings)


def _pretrain(options) -> int | None:
    from bert_jax import config as config_lib

    config = config_lib.load(options.config)
    _take_rows(config, options.rows)

    from bert_jax import device, distributed

    distributed.start()
    device.start(config.platform)

    from bert_jax.tasks import pretraining
    from bert_jax.train import Interrupted, train

    config, vocabulary, data, stages = pretraining.stages(config)
    try:
        train(config, vocabulary, data, stages, options.workdir, options.resume == "force")
    except Interrupted as stopped:
        print(f"bert-jax pretrain: {stopped}; run the same command to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    return None


def _take_rows(config, folders: list[str]) -> None:
    """`--rows`, once a phase, into the config."""
    if folders and len(folders) != len(config.phases):
        raise UserError(
            f"{len(folders)} --rows for the config's {len(config.phases)} phases "
            f"({', '.join(f'T={p.tokens or chr(63)}' for p in config.phases)}): give one a phase, or "
            "choose a config of one phase, such as configs/pretrain.py:base,128"
        )
    for phase, rows in zip(config.phases, folders, strict=bool(folders)):
        phase.rows = rows


def _finetune(options) -> int | None:
    from bert_jax import config as config_lib

    config = config_lib.load(options.config, config_lib.FinetuneConfig)
    if options.data:
        config.task.data = options.data
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: it must be 1 or more")

    from bert_jax import device, distributed

    distributed.start()
    device.start(config.platform)

    from bert_jax import finetune
    from bert_jax.train import Interrupted

    try:
        summary = finetune.finetune(
            config,
            options.init,
            options.workdir,
            seeds=options.seeds,
            vocab=options.vocab,
            which=options.checkpoint,
            force=options.resume == "force",
        )
    except Interrupted as stopped:
        print(f"bert-jax finetune: {stopped}; run the same command to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(finetune.describe(summary))
    return None


def _predict(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax import finetune

    finetune.predict_file(options.workdir, options.source, options.out, options.checkpoint)


def _score(options) -> None:
    from bert_jax import score

    found = score.score(options.benchmark, options.data, options.predictions, options.null_odds)
    for name, value in found.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")


def _glue_zip(options) -> None:
    from bert_jax.tasks import glue

    for line in glue.submission(options.folders, options.out):
        print(line)


def _evaluate(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax import workdir
    from bert_jax.config import FinetuneConfig

    if isinstance(workdir.read_config(options.workdir), FinetuneConfig):
        from bert_jax import finetune

        if options.rows or options.all:
            raise UserError(
                f"--rows and --all are for pretraining; {options.workdir} is measured on all of its "
                "own task's data"
            )

        summary = finetune.evaluate_run(options.workdir, which=options.checkpoint)
        print(json.dumps(summary) if options.json else finetune.describe(summary))
        return

    from bert_jax.evaluate import evaluate_workdir

    step, found = evaluate_workdir(options.workdir, options.rows, options.checkpoint, options.all)
    if options.json:
        print(json.dumps({"step": step, **found}))
    else:
        print(f"step {step:,} of {options.workdir}, held-out")
        for name, value in found.items():
            print(f"  {name:24} {value:.4f}")


def _replay(options) -> int:
    from bert_jax import device

    device.start("")

    from bert_jax import replay

    found = replay.replay(options.workdir, options.step)
    if options.json:
        told = {"recorded": found.incident.told, "replayed": found.said, "same": found.same}
        print(json.dumps(told))
    else:
        print(replay.describe(found))
    return 0 if found.same else EXIT_NO


def _fill_mask(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.explore import MaskFiller

    fill = MaskFiller(options.init, options.checkpoint)
    texts = options.texts
    if texts in ([], ["-"]):
        from bert_jax.data.texts import read

        texts = (text for text, _ in read("-", "text").texts if text.strip())
    for text in texts:
        masks = fill(text, options.top)
        if options.json:
            found = [[c._asdict() for c in candidates] for candidates in masks]
            print(json.dumps({"text": text, "masks": found}, ensure_ascii=False), flush=True)
            continue
        print(text)
        for candidates in masks:
            print(
                "  " + "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates), flush=True
            )


def _attention(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.explore import AttentionMapper
    from bert_jax.report import attention

    attention.paths(options.out)  # what is wrong with it is said before the model is read
    maps = AttentionMapper(options.init, options.checkpoint)(options.text, options.text_b)
    written = attention.write(maps, options.init, options.out, options.rollout)
    layers, heads, tokens, _ = maps.probabilities.shape
    print(f"{', '.join(map(str, written))}: {layers} layers of {heads} heads, {tokens} tokens")


def _import(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.convert import source

    imported = source.import_checkpoint(
        options.source,
        options.out,
        revision=options.revision,
        vocab=options.vocab,
        lowercase=options.lowercase,
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )
    print(f"{options.out}: {source.describe(imported)}")


def _export(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.convert.export import export

    settings = export(options.init, options.out, options.checkpoint, options.heads)
    name = settings["architectures"][0]
    print(f'{options.out}: {name}; transformers.{name}.from_pretrained("{options.out}") loads it')


def _embed(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.convert.source import open_model
    from bert_jax.embed import Embedder, embed_file

    config, vocabulary, params, _ = open_model(options.init, options.checkpoint)
    for name in ("pooling", "layers", "normalize", "tokens"):
        if (value := getattr(options, name)) is not None:
            setattr(config.embed, name, value)
    if options.overlap is not None and options.long != "window":
        raise UserError("--overlap is of windows: add --long window")
    try:
        weights = tuple(float(w) for w in options.weights.split(",")) if options.weights else ()
    except ValueError:
        raise UserError(f"--weights {options.weights}: numbers with commas between them") from None
    embedder = Embedder(
        config,
        vocabulary,
        params,
        long=options.long,
        overlap_tokens=64 if options.overlap is None else options.overlap,
        weights=weights,
    )
    counts = embed_file(embedder, options.source, options.out, options.column)
    print(f"{options.out}: {counts}")


def _launch(options) -> int | None:
    from bert_jax import config as config_lib
    from bert_jax import launch

    kinds = {"pretrain": config_lib.Config, "finetune": config_lib.FinetuneConfig}
    if options.command[:1] not in ([verb] for verb in kinds):
        raise UserError(
            "give pretrain or finetune with its arguments after --, as in: bert-jax launch "
            f"--on {options.on} -- pretrain --config configs/pretrain.py:base --rows … --workdir …"
        )
    # What is wrong with the command is said here, and not by a machine that took a day to get.
    config, rest = config_lib.split(options.command)
    launched = _parser().parse_args(rest)
    config_lib.load(config, kinds[launched.verb])

    given = vars(options).copy()
    for name in ("verb", "run", "takes_config", "config", "command", "on", "dry_run", "name"):
        del given[name]
    file = next(a for a in config if a.startswith("--config=")).removeprefix("--config=")
    plan = launch.plan(
        options.on, options.command, file.partition(":")[0], launched.workdir, options.name, given
    )
    if options.dry_run:
        print(launch.script(plan))
        return None
    return launch.run(plan)


def _preflight(options) -> int:
    from bert_jax import config as config_lib

    config = config_lib.load(options.config)
    _take_rows(config, options.rows)
    if options.sequences < 1:
        raise UserError(f"--sequences {options.sequences}: it must be 1 or more")
    if options.dollars_per_chip_hour is not None and options.dollars_per_chip_hour <= 0:
        raise UserError(f"--dollars-per-chip-hour {options.dollars_per_chip_hour}: a price above 0")

    from bert_jax import device, preflight

    topologies = [preflight.parse_topology(text) for text in options.topology]
    device.start("cpu", cache=False)
    fits = True
    for i, topology in enumerate(topologies):
        report = preflight.preflight(
            config, topology, options.sequences, options.dollars_per_chip_hour
        )
        fits = fits and report["fits"]
        if options.json:
            print(json.dumps(report), flush=True)
        else:
            print(("\n" if i else "") + preflight.describe(report), flush=True)
    return 0 if fits else EXIT_NO


def _report(options) -> None:
    from bert_jax import device

    device.start("cpu")  # shapes are all that is computed

    from bert_jax.report import experiment, runs

    # os.path, for which a name that no file can have is no error.
    experiments = [f for f in options.folders if os.path.exists(os.path.join(f, "sweep.py"))]
    for folder in experiments:
        print(experiment.write_readme(folder))
    if len(experiments) < len(options.folders):
        folders = [folder for folder in options.folders if folder not in experiments]
        for path in runs.write(folders, options.out, options.pictures):
            print(path)


def _sweep(options) -> int | None:
    import pathlib

    from bert_jax import sweep
    from bert_jax.sweep import cost, run, scheduler

    for name in ("jobs", "seeds", "search"):
        if getattr(options, name) < (name == "jobs"):
            raise UserError(f"--{name} {getattr(options, name)}: it must be above 0")
    if options.topology and not options.dry_run:
        raise UserError("--topology tells times for other hardware: add --dry-run")
    if options.launch and options.on == "local":
        raise UserError(f"--launch {options.launch[0]} is for another engine: add --on")
    if options.resubmit and options.on not in scheduler.HANDED_OVER:
        raise UserError(
            "--resubmit is for engines that queue jobs: " + ", ".join(scheduler.HANDED_OVER)
        )
    if options.search and (options.dry_run or options.only):
        raise UserError("--search makes its own points: leave out --dry-run and --only")
    given = sweep.Given(
        options.scale, pathlib.Path(options.data).absolute(), options.init, options.seeds
    )
    found = sweep.select(sweep.load(options.file, given), options.only)
    engine = scheduler.Engine(options.on, options.launch, options.jobs)
    runs = pathlib.Path(options.runs)
    if options.dry_run:
        print(cost.describe(found, runs.absolute(), engine, _speed(options.topology)))
        return None
    return run.run(found, runs, engine, resubmit=options.resubmit, trials=options.search)


def _speed(topology: str | None) -> float:
    """FLOP/s to expect of a topology, 0 for this machine."""
    if not topology:
        return 0.0
    from bert_jax import preflight
    from bert_jax.sweep.cost import UTILIZATION

    there = preflight.parse_topology(topology)
    return there.chips * there.chip.flops * UTILIZATION
