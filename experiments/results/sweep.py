"""The main claims of the project with their numbers, from the results files of the other folders."""

import collections
import json
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import pages
from pages import HERE as EXPERIMENTS
from pages import Lines, read

from bert_jax.tools import sweep
from bert_jax.tools.sweep.experiment import Claims
from bert_jax.tools.sweep.results import Results, current

# How the most important claims begin; the project's own page has the first `FRONT` of them.
MAIN = (
    "masked-LM loss of base",
    "BLiMP",
    "SST-2, accuracy in %, all-MiniLM",
    "pretraining speed of base, T=128, 256 rows, deterministic=true",
    "pretraining, mini, T=128",
    "runs killed",
    "SST-2, accuracy in %, base",
    "masked-LM loss of L4-H256",
    "`make quickstart`",
    "mutants killed",
)
FRONT = 5
NOT_RUN = "not run"
OUTCOMES = (NOT_RUN, "not significant", "opposite", "p: -", "yes")
# How outcomes are counted here.
WORDS = {
    "opposite": "significant in the opposite direction",
    "p: -": "with one pretraining seed, not tested",
    "yes": "significant",
}
TITLES = {
    "wnut17": "WNUT-17, F1 in %",
    "cola": "CoLA, Matthews correlation in %",
    "squad1": "SQuAD 1.1, one paragraph in 12, F1 in %",
    "squad1-all": "SQuAD 1.1, F1 in %",
    "rte": "RTE, accuracy in %",
    "banking77": "Banking77 (test), accuracy in %",
    "qnli": "QNLI from 8,999 examples, accuracy in %",
    "sst2": "SST-2, accuracy in %",
    "clinc150": "CLINC150 in scope, accuracy in %",
}
TABLES = {"wnut17": "table7", "banking77": "more", "clinc150": "more"}
Line = dict[str, Any]


class Row(NamedTuple):
    """A claim.

    Attributes:
        claim: what is claimed or measured.
        ours: the number, or `NOT_RUN`.
        reference: what it is compared with, with its number and source.
        hardware: what it ran on.
        page: folder in experiments/ whose page has the details and the command.
    """

    claim: str
    ours: str
    reference: str
    hardware: str
    page: str

    def cells(self, where: str) -> tuple[str, ...]:
        """Return the cells of a row; `where` is the path to experiments/."""
        return *self[:4], f"[{self.page.rpartition('/')[2]}]({where}/{self.page}/README.md)"


def count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


def cores(line: Line) -> str:
    return count(line["cores"], "CPU core")


def learning() -> Iterator[Row]:
    """What models learn from scratch, compared with unigram models."""
    folder = EXPERIMENTS / "pretraining"
    levels = json.loads((folder / "plateau" / "levels.json").read_text())
    # A unigram model sees the tenth of the targets that is kept.
    unigram = {name: f"unigram model: {0.9 * x['unigram']:.2f}" for name, x in levels.items()}
    lines = read(folder / "plateau" / "results.jsonl")
    for model in ("T=128", "8, 16, 32, 64, 128"):
        runs = [line for line in lines if line["facts"].get("model") == model]
        losses = [line["metrics"]["masked_lm_loss"] for line in runs]
        seeds = "1 seed" if len(losses) == 1 else f"median of {len(losses)} seeds"
        start = "rows of T=128" if model == "T=128" else "T=8, 16, 32, 64, then 128"
        yield Row(
            f"masked-LM loss of L4-H128 after 3,000 steps, {start} (nats)",
            f"{statistics.median(losses):.2f} ({seeds})",
            unigram["plateau"],
            cores(runs[0]),
            "pretraining/plateau",
        )
    mini, base = (
        json.loads((folder / name / "results.json").read_text()) for name in ("mini", "base")
    )
    yield Row(
        f"masked-LM loss of L4-H256 (`mini`) after {mini['real_tokens'] / 1e6:.1f} million tokens, 15% masked (nats)",
        f"{mini['losses']['per_piece']:.2f} (1 seed)",
        unigram["single"],
        cores(mini),
        "pretraining/mini",
    )
    yield Row(
        f"masked-LM loss of base after {base['real_tokens'] / 1e6:.0f} million tokens, 15% masked (nats)",
        f"{base['losses']['per_piece']:.2f} (1 seed)",
        f"L4-H256 (`mini`): {mini['losses']['per_piece']:.2f}",
        base["starts"][-1]["devices"],
        "pretraining/base",
    )
    yield Row(
        "BLiMP of the same base, 200 pairs per paradigm, accuracy in %",
        f"{100 * base['minimal_pairs']['blimp']:.1f} (1 seed)",
        "DistilBERT (cased) 78.3, RoBERTa-large 86.5 (Salazar et al. 2020)",
        base["starts"][-1]["devices"],
        "pretraining/base",
    )
    lines = read(EXPERIMENTS / "speed" / "quickstart.jsonl")
    minutes = [(line["install_seconds"] + line["seconds"]) / 60 for line in lines]
    yield Row(
        "`make quickstart` in a fresh clone, with installation",
        f"{statistics.median(minutes):.1f} minutes (median; {min(minutes):.1f} to {max(minutes):.1f} "
        f"in {len(minutes)} runs)",
        "",
        cores(lines[-1]),
        "speed",
    )


def gpu() -> Iterator[Row]:
    """Speed on a GPU compared with PyTorch, with and without deterministic kernels."""
    speed, lines = pages.module("speed"), read(EXPERIMENTS / "speed" / "gpu.jsonl")
    peak = next(line["sheet_operations_per_second"] for line in lines if line["kind"] == "ceilings")
    for line in lines:
        # The baseline has attention dropout 0.1, so steps without it are not compared here.
        if line["kind"] == "step" and line["attention_dropout"] and "status" not in line:
            share = line["real_tokens_per_second"] * line["operations_per_token"] / peak
            value = "true (the default)" if line["deterministic"] else "false"
            yield Row(
                f"pretraining speed of base, T=128, {line['rows']} rows, deterministic={value}",
                f"{speed.gpu_speedup(line, lines):.2f}x, {share:.0%} of the bfloat16 peak",
                f"transformers with torch.compile; data sheet: {peak / 1e12:.0f} TFLOP/s",
                line["device"],
                "speed",
            )


def _spread(line: Line) -> str:
    """Return the mean and standard deviation of the scores over seeds, in percent."""
    values = [value * (1 if line["set"].startswith("squad1") else 100) for value in line["values"]]
    mean = f"{statistics.fmean(values):.1f}"
    if len(values) == 1:
        return f"{mean} (1 seed)"
    return f"{mean} ± {statistics.stdev(values):.1f} ({len(values)} seeds)"


def fine_tuning() -> Iterator[Row]:
    """Fine-tuning compared with transformers' Trainer, from the same weights, and with random parameters."""
    folder = EXPERIMENTS / "paper"
    lines = read(folder / "finetuning.jsonl")
    trainer = {line["set"]: line for line in read(folder / "trainer.jsonl")}
    random = {line["set"]: line for line in lines if line["start"] == "none"}
    for line in sorted(lines, key=lambda line: list(TITLES).index(line["set"])):
        name = line["set"]
        if line["start"] == "minilm":
            what = "all-MiniLM-L6-v2 fine-tuned"
            other = _spread(trainer[name]) if name in trainer else NOT_RUN
            reference = f"transformers' Trainer: {other}"
        elif line["start"] == "base":
            what = "base pretrained on 22 million words and fine-tuned"
            reference = f"random parameters, L4-H256: {_spread(random[name])}"
        else:
            continue
        device = line.get("device", "1 cpu")
        page = TABLES.get(name, "table2" if name.startswith("squad") else "table1")
        yield Row(
            f"{TITLES[name]}, {what}",
            _spread(line),
            reference,
            cores(line) if device == "1 cpu" else device,
            f"paper/{page}",
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
            is_run = numbers[NOT_RUN] < numbers.total()
            yield Row(
                f"{title}: {count(numbers.total(), 'comparison')}, {scale} scale",
                ours if is_run else NOT_RUN,
                "Devlin et al. 2018" if name.startswith("paper/") else "",
                cores(runs[0]) if is_run and "cores" in runs[0] else "",
                name,
            )


def reliability() -> Iterator[Row]:
    """Robustness."""
    folder, cpu = EXPERIMENTS / "reliability", "2 CPU cores"
    kills = collections.defaultdict(list)
    for line in read(folder / "kills.jsonl"):
        kills[line.get("device", cpu)].append(line)
    for device, lines in kills.items():
        killed = {(each["seed"], each["command"], each["run"]): each["differs"] for each in lines}
        yield Row(
            "runs killed by SIGKILL and restarted",
            f"{len(lines)} kills in {len(killed)} runs, {sum(map(bool, killed.values()))} runs ended differently",
            "the same bits as an undisturbed run",
            device,
            "reliability",
        )
    fuzz = read(folder / "fuzz.jsonl")
    inputs, failed = (sum(line[key] for line in fuzz) for key in ("inputs", "failed"))
    yield Row(
        "fuzzed inputs",
        f"{inputs:,} inputs, {failed} failed",
        "read correctly, or a one-line error",
        cpu,
        "reliability",
    )
    mutants = [line for line in read(folder / "mutations.jsonl") if "by" in line]
    ours = f"{sum(line['by'] is not None for line in mutants)} of {len(mutants)}"
    yield Row("mutants killed by tests", ours, "", cpu, "reliability")


def cpu() -> Iterator[Row]:
    """Speed on CPUs compared with other implementations."""
    for workload, baseline, times, hardware in pages.module("speed").speedups():
        yield Row(workload, f"{times}x", baseline, hardware, "speed")


GROUPS = (learning, gpu, fine_tuning, paper, reliability, cpu)
HEAD = ("claim", "bert_jax", "reference", "hardware", "page")


def main_claims() -> list[Row]:
    """Return the claims of `MAIN`, in its order."""
    rows = [row for group in GROUPS for row in group()]
    return [next(row for row in rows if row.claim.startswith(begin)) for begin in MAIN]


def front() -> list[str]:
    """Return the first claims, for the project's own page."""
    return pages.table(HEAD, [row.cells("experiments") for row in main_claims()[:FRONT]])


def claims() -> list[str]:
    """Return all claims, by group."""
    lines = []
    for group in GROUPS:
        title = (group.__doc__ or "").rstrip(".")
        lines += ["", f"## {title}", "", *pages.table(HEAD, [row.cells("..") for row in group()])]
    return lines[1:]


def get_blocks(results) -> dict[str, Lines]:
    """Return the blocks of the page."""
    main = pages.table(HEAD, [row.cells("..") for row in main_claims()])
    return {"main": Lines(lambda *_: main), "claims": Lines(lambda *_: claims())}
