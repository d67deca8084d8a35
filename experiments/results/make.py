"""Write README.md, the main claims of the project with their numbers, and its first lines on the front page.

    python experiments/results/make.py

The numbers come from the results files of experiments/, which the commands on their pages wrote.
"""

import collections
import dataclasses
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
ROOT = EXPERIMENTS.parent
sys.path[:0] = [str(EXPERIMENTS / "speed"), str(EXPERIMENTS)]

import report as speed  # noqa: E402
from paper.more import run as finetuning  # noqa: E402

from bert_jax.storage import files  # noqa: E402
from bert_jax.tools import sweep  # noqa: E402
from bert_jax.tools.sweep.experiment import Claims  # noqa: E402
from bert_jax.tools.sweep.results import Results, current  # noqa: E402

FRONT = 10
# What measures the numbers of a page, where it is no sweep.
COMMANDS = {
    "pretraining/mini": "experiments/pretraining/mini/run.sh",
    "pretraining/base": "experiments/pretraining/base/run.sh",
    "speed": "make bench",
    "speed/prepare": "python experiments/speed/prepare/benchmark.py --text FILE --vocab DIR --fill",
    "reliability": "make soak",
}
GPU = "python experiments/speed/gpu.py --out DIR"
GPU_KILLS = "JAX_PLATFORMS=cuda python experiments/reliability/kills.py --only pretrain finetune"
NOT_RUN = "not run"
OUTCOMES = (NOT_RUN, "not significant", "opposite", "p: -", "yes")
# How outcomes are counted here.
WORDS = {
    "opposite": "significant in the opposite direction",
    "p: -": "with one pretraining seed, not tested",
    "yes": "significant",
}
SHEET = "data sheet: 989 TFLOP/s"
Line = dict[str, Any]


@dataclasses.dataclass
class Row:
    """A claim.

    Attributes:
        claim: what is claimed or measured.
        ours: the number, or `NOT_RUN`.
        reference: what it is compared with, with its number and source.
        hardware: what it ran on.
        commit: commit of the program, where it was recorded.
        page: folder in experiments/ whose page has the details.
        command: what measures it; "" for that of the page.
    """

    claim: str
    ours: str
    reference: str
    hardware: str
    commit: str
    page: str
    command: str = ""

    def markdown(self) -> str:
        """Return the row of the page of all claims."""
        link = f"[{self.page}](../{self.page}/README.md)"
        default = COMMANDS.get(self.page, f"bert-jax sweep experiments/{self.page}")
        cells = [self.claim, self.ours, self.reference, self.hardware, self.commit, link]
        command = f"`{self.command or default}`"
        return f"| {' | '.join(cells)}: {command} |"

    def short(self) -> str:
        """Return the row of the project's own page, without commit and command."""
        link = f"[{self.page}](experiments/{self.page}/README.md)"
        return f"| {' | '.join([self.claim, self.ours, self.reference, self.hardware, link])} |"


def read(path: str) -> list[Line]:
    """Return the lines of a results file in experiments/."""
    with open(EXPERIMENTS / path) as file:
        return [json.loads(line) for line in file]


def count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


def cores(line: Line) -> str:
    return count(line["cores"], "CPU core")


def commits(lines: Iterable[Line]) -> str:
    """Return the commits of lines, or the first and last of many."""
    names = list(dict.fromkeys(line["commit"] for line in lines if line.get("commit")))
    return ", ".join(names if len(names) < 3 else [names[0], "…", names[-1]])


def sweep_command(name: str, scale: str) -> str:
    """Return the command that runs a sweep at a scale."""
    options = "" if scale == "small" else f" --scale {scale} --data DATA"
    return f"bert-jax sweep experiments/{name}{options}"


# --- Claims ---------------------------------------------------------------------------------------


def learning() -> Iterator[Row]:
    """What models learn from scratch, compared with unigram models."""
    levels = json.loads((EXPERIMENTS / "pretraining" / "plateau" / "levels.json").read_text())
    lines = read("pretraining/plateau/results.jsonl")
    for model in ("T=128", "8, 16, 32, 64, 128"):
        runs = [line for line in lines if line["facts"].get("model") == model]
        losses = [line["metrics"]["masked_lm_loss"] for line in runs]
        seeds = "1 seed" if len(losses) == 1 else f"median of {len(losses)} seeds"
        start = "rows of T=128" if model == "T=128" else "T=8, 16, 32, 64, then 128"
        yield Row(
            f"masked-LM loss of L4-H128 after 3,000 steps, {start} (nats)",
            f"{statistics.median(losses):.2f} ({seeds})",
            _unigram(levels["plateau"]),
            cores(runs[0]),
            commits(runs),
            "pretraining/plateau",
        )
    mini = json.loads((EXPERIMENTS / "pretraining" / "mini" / "results.json").read_text())
    yield Row(
        f"masked-LM loss of L4-H256 (`mini`) after {mini['real_tokens'] / 1e6:.1f} million tokens, 15% masked (nats)",
        f"{mini['losses']['per_piece']:.2f} (1 seed)",
        _unigram(levels["single"]),
        cores(mini),
        commits(mini["starts"]),
        "pretraining/mini",
    )
    base = json.loads((EXPERIMENTS / "pretraining" / "base" / "results.json").read_text())
    yield Row(
        f"masked-LM loss of base after {base['real_tokens'] / 1e6:.0f} million tokens, 15% masked (nats)",
        f"{base['losses']['per_piece']:.2f} (1 seed)",
        f"L4-H256 (`mini`): {mini['losses']['per_piece']:.2f}",
        base["starts"][-1]["devices"],
        commits(base["starts"]),
        "pretraining/base",
    )
    yield Row(
        "BLiMP of the same model, 200 pairs a paradigm, accuracy in %",
        f"{100 * base['minimal_pairs']['blimp']:.1f} (1 seed)",
        "DistilBERT (cased) 78.3, RoBERTa-large 86.5 (Salazar et al. 2020)",
        base["starts"][-1]["devices"],
        commits(base["starts"]),
        "pretraining/base",
        "bert-jax blimp --init runs/base --data $BERT_JAX_DATA/blimp $BERT_JAX_DATA/zorro --pairs 200 --json",
    )
    lines = read("speed/quickstart.jsonl")
    minutes = [(line["install_seconds"] + line["seconds"]) / 60 for line in lines]
    yield Row(
        "`make quickstart` in a fresh clone, with installation",
        f"{statistics.median(minutes):.1f} minutes (median; {min(minutes):.1f} to {max(minutes):.1f} "
        f"in {len(minutes)} runs)",
        "",
        cores(lines[-1]),
        commits(lines),
        "speed",
        "python experiments/speed/quickstart.py",
    )


def _unigram(levels: Line) -> str:
    """Return the loss of a unigram model that sees the tenth of the targets that is kept."""
    return f"unigram model: {0.9 * levels['unigram']:.2f}"


def miniberta() -> Iterator[Row]:
    """Masked LM on ten million words."""
    results = current(Results(EXPERIMENTS / "pretraining" / "miniberta").read())
    for scale, sizes in sweep.module_of(
        EXPERIMENTS / "pretraining" / "miniberta" / "sweep.py"
    ).SIZES.items():
        for size in sizes:
            runs = [r for r in results if r["scale"] == scale and r["facts"].get("of") == size]
            losses = runs[-1]["metrics"] if runs else None
            yield Row(
                f"{size} on 10M words, held-out masked-LM loss",
                f"{losses['per_piece']:.2f} nats per piece, {losses['per_word']:.2f} per word"
                if losses
                else NOT_RUN,
                "roberta-base-10M: 2.38 nats per BPE token (Zhang et al. 2020)",
                cores(runs[-1]) if runs else "",
                commits(runs),
                "pretraining/miniberta",
                sweep_command("pretraining/miniberta", scale),
            )


def fine_tuning() -> Iterator[Row]:
    """Fine-tuning compared with transformers' Trainer, from the same weights, and with random parameters."""
    trainer, lines = read("paper/more/trainer.jsonl"), read("paper/more/results.jsonl")
    pairs = [
        (line, next((other for other in trainer if finetuning.same_schedule(line, other)), None))
        for line in lines
        if line["start"] == "minilm"
    ]
    for line, other in sorted(pairs, key=lambda pair: pair[1] is None):
        yield Row(
            f"{finetuning.SETS[line['set']].title}, all-MiniLM-L6-v2 fine-tuned",
            finetuning.spread(line),
            f"transformers' Trainer: {finetuning.spread(other) if other else f'{NOT_RUN} with this schedule'}",
            finetuning.hardware(line),
            line.get("commit", ""),
            "paper/more",
            f"python experiments/paper/more/run.py {line['set']} --starts minilm --seeds {len(line['values'])}",
        )
    for scores in read("paper/more/transformers.jsonl"):
        yield Row(
            f"{finetuning.SETS[scores['set']].title}, answers from the same fine-tuned weights",
            f"{scores['bert_jax']['f1']:.1f}",
            f"transformers: {scores['transformers']['f1']:.1f}, {scores['same_answers']:.1%} the same",
            finetuning.hardware(scores),
            "",
            "paper/more",
            f"python experiments/paper/more/in_transformers.py {scores['set']}",
        )
    random = {line["set"]: line for line in lines if line["start"] == "none"}
    for line in lines:
        if line["start"] == "base":
            yield Row(
                f"{finetuning.SETS[line['set']].title}, base pretrained on 22 million words and fine-tuned",
                finetuning.spread(line),
                f"random parameters, L4-H256: {finetuning.spread(random[line['set']])}",
                finetuning.hardware(line),
                line["commit"],
                "paper/more",
                f"python experiments/paper/more/run.py {line['set']} --starts runs/base --seeds "
                f"{len(line['values'])} --change model.dtype=bfloat16",
            )


def speeds() -> Iterator[Row]:
    """Speed compared with other implementations."""
    lines = read("speed/results.jsonl")
    for comparison in speed.FRONT:
        claim = f"speed, {comparison.workload}"
        line, times = speed.speed_up(lines, comparison)
        if line is None:
            yield Row(claim, NOT_RUN, comparison.baseline, "", "", "speed")
        else:
            ours = f"{times:.2g}x" if times < 1 else f"{times:.1f}x"
            yield Row(claim, ours, comparison.baseline, cores(line), commits([line]), "speed")


def gpu() -> Iterator[Row]:
    """Speed on a GPU compared with PyTorch, with and without deterministic kernels."""
    lines = read("speed/gpu.jsonl")
    peak = next(line["sheet_operations_per_second"] for line in lines if line["kind"] == "ceilings")
    for line in lines:
        # The baseline has attention dropout 0.1, so steps without it are not compared here.
        if line["kind"] == "step" and line["attention_dropout"] and "status" not in line:
            share = line["real_tokens_per_second"] * line["operations_per_token"] / peak
            value = "true (the default)" if line["deterministic"] else "false"
            yield Row(
                f"pretraining speed of base, T=128, {line['rows']} rows, deterministic={value}",
                f"{speed.gpu_speedup(line, lines):.2f}x, {share:.0%} of the bfloat16 peak",
                f"transformers with torch.compile; {SHEET}",
                line["device"],
                line["commit"],
                "speed",
                GPU,
            )


def paper() -> Iterator[Row]:
    """Comparisons between models, by experiment and scale."""
    for path in sorted(EXPERIMENTS.glob("*/*/sweep.py")):
        name, module = path.parent.relative_to(EXPERIMENTS).as_posix(), sweep.module_of(path)
        results = current(Results(path.parent).read())
        title = (path.parent / "README.md").read_text().partition("\n")[0].removeprefix("# ")
        outcomes: dict[str, collections.Counter[str]] = {}
        for block in module.get_blocks(results).values():
            if isinstance(getattr(block, "block", None), Claims):
                outcomes.setdefault(block.scale, collections.Counter()).update(
                    next((o for o in OUTCOMES if o in text), "other")
                    for text in block.markdown(results, path.parent).splitlines()
                    if text.startswith("- ")
                )
        for scale, numbers in outcomes.items():
            runs = [line for line in results if line["scale"] == scale and "step" in line]
            ours = ", ".join(f"{number} {WORDS.get(o, o)}" for o, number in numbers.items())
            is_run = numbers["not run"] < numbers.total()
            yield Row(
                f"{title}: {count(numbers.total(), 'comparison')}, {scale} scale",
                ours if is_run else NOT_RUN,
                "Devlin et al. 2018" if name.startswith("paper/") else "",
                cores(runs[0]) if is_run and "cores" in runs[0] else "",
                commits(runs) if is_run else "",
                name,
                sweep_command(name, scale),
            )


def reliability() -> Iterator[Row]:
    """Robustness."""
    kills = collections.defaultdict(list)
    for line in read("reliability/kills.jsonl"):
        kills[line.get("device", "")].append(line)
    for device, lines in kills.items():
        killed = {(each["seed"], each["command"], each["run"]): each["differs"] for each in lines}
        yield Row(
            "runs killed by SIGKILL and restarted",
            f"{len(lines)} kills in {len(killed)} runs, {sum(map(bool, killed.values()))} runs ended differently",
            "the same bits as an undisturbed run",
            device or "2 CPU cores",
            "",
            "reliability",
            f"{GPU_KILLS} --kills {len(lines)} --seed {lines[0]['seed']}" if device else "",
        )
    fuzz = read("reliability/fuzz.jsonl")
    times = fuzz[-1]["times"]
    inputs, failed = (sum(line[key] for line in fuzz) for key in ("inputs", "failed"))
    yield Row(
        "fuzzed inputs",
        f"{inputs:,} inputs, {failed} failed",
        "read correctly, or a one-line error",
        "2 CPU cores",
        "",
        "reliability",
        f"make soak SOAK={times}",
    )
    for name, what in (
        ("attacks", "fault-injection scenarios passed"),
        ("mutations", "mutants killed by tests"),
    ):
        if (EXPERIMENTS / "reliability" / f"{name}.jsonl").exists():
            lines = [x for x in read(f"reliability/{name}.jsonl") if "by" in x or name == "attacks"]
            good = sum(line.get("by", "") is not None for line in lines)
            ours = f"{good} of {len(lines)}"
            command = f"python experiments/reliability/{name}.py"
            yield Row(what, ours, "", "2 CPU cores", "", "reliability", command)


def text() -> Iterator[Row]:
    """Preparing rows."""
    (line,) = (line for line in read("speed/prepare/results.jsonl") if line["what"] == "fill")
    packed, single = line["fill"]["T=128 S=4 nsp"], line["fill"]["T=128 S=1 nsp"]
    yield Row(
        "real tokens in packed rows of T=128",
        f"{packed:.1%}",
        f"one sequence a row: {single:.1%}",
        line["machine"].partition(",")[0],
        "",
        "speed/prepare",
    )


GROUPS = (learning, gpu, fine_tuning, speeds, paper, miniberta, text, reliability)
HEAD = [
    "| claim | bert_jax | reference | hardware | commit | page: command |",
    "|---|---|---|---|---|---|",
]


def table(rows: Iterable[Row]) -> str:
    """Return rows as Markdown."""
    return "\n".join([*HEAD, *(row.markdown() for row in rows)])


def page() -> str:
    """Return the page of all claims."""
    parts = [
        "# Results",
        "The main claims of the project with their numbers, written by `python experiments/results/make.py` from "
        'the results files. "Not run" marks claims without a measurement. The linked pages give all '
        "numbers, their spread and their limitations.",
    ]
    for group in GROUPS:
        parts += [f"## {group.__doc__.rstrip('.')}", table(group())]
    return "\n\n".join(parts) + "\n"


def front(text: str) -> str:
    """Return the project's own page with the first claims between the `results` markers."""
    rows = [row for group in GROUPS for row in group()][:FRONT]
    head = ["| claim | bert_jax | reference | hardware | page |", "|---|---|---|---|---|"]
    lines = ["", *head, *(row.short() for row in rows), ""]
    return re.sub(
        "(<!-- results -->).*(<!-- /results -->)",
        lambda m: m[1] + "\n".join(lines) + m[2],
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Write both pages."""
    files.write(HERE / "README.md", page())
    path = ROOT / "README.md"
    files.write(path, front(path.read_text()))


if __name__ == "__main__":
    main()
