"""Write results.json, curve.svg and README.md of this folder, or of another one, from a finished run.

python experiments/pretraining/mini/record.py --workdir runs/mini
python experiments/pretraining/mini/record.py --workdir runs/base --page experiments/pretraining/base
python experiments/pretraining/mini/record.py --workdir runs/mini --name gpu    # the recipe again, on a GPU

With --name it writes NAME.json instead of results.json, and the page compares the two runs.
Without a checkpoint in the workdir, the page lacks what needs one. With WORKDIR/blimp.json, which
`bert-jax blimp --data $BERT_JAX_DATA/blimp $BERT_JAX_DATA/zorro --pairs 200 --json` has printed, it
shows the accuracies on minimal pairs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.with_name("miniberta")))

import measure  # noqa: E402

from bert_jax.data.rows import read_manifest  # noqa: E402
from bert_jax.runs import workdir  # noqa: E402
from bert_jax.tools.report import curves, runs  # noqa: E402

DATA = pathlib.Path(os.environ.get("BERT_JAX_DATA", ""))
TEXT = DATA / "text"
SOURCES = (f"{TEXT}/wikipedia/*.gz", f"books:{TEXT}/books/*.gz")
TEXTS = (
    "The capital of [MASK] is Paris.",
    "He was born in [MASK] and died in 1902.",
    "The king and the [MASK] were married in the church.",
    "She opened the [MASK] and went into the room.",
    "The band released their second [MASK] in 1985.",
)


def fill_masks(folder: str) -> list[dict]:
    """Return the answers of `bert-jax fill-mask` for five texts."""
    command = ["-c", "from bert_jax.cli import main; main()", "fill-mask", "--json"]
    done = subprocess.run(
        [sys.executable, *command, "--init", folder, *TEXTS],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def minimal_pairs(path: pathlib.Path) -> dict[str, float]:
    """Return the mean accuracies on BLiMP and Zorro from the output of `bert-jax blimp`."""
    accuracies = json.loads(path.read_text())["by_phenomenon"]
    means = {}
    for name in ("blimp", "zorro"):
        files = {file.name.partition(".")[0] for file in (DATA / name).iterdir()}
        means[name] = statistics.fmean(accuracies[each] for each in files & accuracies.keys())
    return means


def main() -> None:
    """Collect the numbers, and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", default="runs/mini")
    parser.add_argument("--page", type=pathlib.Path, default=FOLDER, help="folder of the page")
    parser.add_argument("--name", default="results", help="of the file of results")
    options = parser.parse_args()
    folder = pathlib.Path(options.workdir)
    config = workdir.read_config(folder)
    lines = workdir.read_lines(folder / "metrics.jsonl")
    progress = curves.clock(curves.read_speed(folder))
    # Of the last quarter of the run, which is in the phase of the longest rows.
    speeds = [
        line
        for line in workdir.read_lines(folder / "speed.jsonl")
        if line["step"] > 0.75 * config.steps
    ]
    rows = [phase.rows for phase in config.phases]
    results = {
        "starts": workdir.read_lines(folder / "starts.jsonl"),
        "steps": config.steps,
        "masking_rate": config.masking.rate,
        "cores": len(os.sched_getaffinity(0)),
        "phases": [
            {
                "tokens": m.tokens,
                "train_rows": m.train.rows,
                "heldout_rows": m.heldout.rows,
                "batch_size": phase.batch_size or config.batch_size,
                "steps_share": phase.fraction,
            }
            for phase, m in zip(config.phases, map(read_manifest, rows), strict=True)
        ],
        "training_minutes": 60 * progress["hours"][-1],
        "real_tokens": progress["tokens"][-1],
        "tokens_per_second": statistics.median(line["real_tokens_per_second"] for line in speeds),
        "mfu": statistics.median(line.get("model_flops_utilization") or 0 for line in speeds),
        "heldout": [line for line in lines if line["split"] == "heldout"],
    }
    if (folder / "checkpoints").exists():
        loss = measure.heldout_loss(options.workdir, rows[-1])
        results["losses"] = measure.units(loss, SOURCES, rows[-1])
        results["fill_mask"] = fill_masks(options.workdir)
    if (folder / "blimp.json").exists():
        results["minimal_pairs"] = minimal_pairs(folder / "blimp.json")
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (options.page / f"{options.name}.json").write_text(text + "\n")
    if options.name == "results":
        runs.write([options.workdir], str(options.page / "curve.svg"))
    (options.page / "README.md").write_text(page(options.page))


# Title of a page, and what else it says about the run, by the name of its folder.
PAGES = {
    "mini": ("BERT-mini (L4 H256 A4)", ""),
    "base": (
        "BERT-base (L12 H768 A12)",
        """
The recipe is that of the [small sizes](../../../configs/pretrain.py), with 16,384 tokens a step and a learning rate of
3e-4; the kernels were deterministic (the default). Other trainings shared the GPU at first, but not in the
last quarter of the steps, whose median is the speed. [Fine-tuning](../../paper/more/README.md) starts from this model, and
the losses of [mini](./README.md) have the same text, T and masking.

At step 500 the held-out loss is already below the levels of unigram and bigram models, which the plot shows. The peak
of the training loss at step 1,600 is the change from T=16 to 128.

For orientation, [roberta-base-10M](../miniberta/README.md) has 2.38 nats per BPE token after 2.6 billion tokens of half
as many words; its text and vocabulary differ from those here.
""",
    ),
}


def hardware(r: dict) -> str:
    """Return the hardware of a run."""
    devices = r["starts"][-1]["devices"]
    return f"{r['cores']} CPU cores" if devices == "1 cpu" else devices


def comparison(results: list[dict]) -> list[str]:
    """Return a table of runs with the same recipe."""

    def losses(key: str, decimals: int) -> list[str]:
        return [f"{r['losses'][key]:.{decimals}f}" for r in results]

    def pairs(key: str) -> list[str]:
        return [
            f"{100 * r['minimal_pairs'][key]:.1f}" if "minimal_pairs" in r else "not run"
            for r in results
        ]

    rows = {
        "minutes of steps": [f"{r['training_minutes']:.1f}" for r in results],
        "held-out loss, 40% masked": [f"{r['heldout'][-1]['masked_lm_loss']:.3f}" for r in results],
        "15% masked, per word piece": losses("per_piece", 2),
        "15% masked, per word": losses("per_word", 2),
        "15% masked, per byte": losses("per_byte", 3),
        "BLiMP, 200 pairs a paradigm": pairs("blimp"),
        "Zorro, 200 pairs a paradigm": pairs("zorro"),
    }
    return [
        "The same recipe on two kinds of hardware, both shared with other work:",
        "",
        f"| | {' | '.join(map(hardware, results))} |",
        f"|---|{'---|' * len(results)}",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        "",
    ]


def page(folder: pathlib.Path) -> str:
    """Return the README of a folder for the results in it."""
    title, notes = PAGES[folder.resolve().name]
    r = json.loads((folder / "results.json").read_text())
    others = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
        if path.stem != "results"
    ]
    starts, last = r["starts"], r["phases"][-1]
    speed = ""
    if "tokens_per_second" in r:
        share = f" ({r['mfu']:.0%} of its bfloat16 peak)" if r["mfu"] else ""
        speed = f" Speed: {r['tokens_per_second']:,.0f} real tokens a second{share}."
    differ = len({start["command"].removesuffix(" --resume force") for start in starts}) > 1
    lines = [
        f"# {title} on Wikipedia and novels",
        "",
        f"{r['steps']:,} steps of {last['tokens'] * last['batch_size']:,} tokens on rows of "
        f"T={', '.join(str(phase['tokens']) for phase in r['phases'])}, in this order: "
        f"{r['real_tokens'] / 1e6:.1f} million tokens in {r['training_minutes']:.0f} minutes of steps on {hardware(r)}, "
        f"which other work shared at times.{speed}",
        "[`run.sh`](run.sh) trains a vocabulary of 8,192 word pieces, prepares rows and pretrains; "
        "[`record.py`](../mini/record.py) writes this page and [`results.json`](results.json) from the finished run."
        + " Each start follows the learning-rate schedule of its own command."
        * differ,
        "The run was started and resumed at these steps:" if len(starts) > 1 else "The command:",
        "",
        *(f"    {start['command']}    # step {start['step']:,}" for start in starts),
        *notes.splitlines(),
        "",
    ]
    if ours := r.get("losses"):
        lines += [
            f"The corpus has {ours['words'] / 1e6:.1f} million words.",
            "",
            "| held-out masked-LM loss, 15% masked | nats |",
            "|---|---|",
            f"| per word piece | {ours['per_piece']:.2f} |",
            f"| per word | {ours['per_word']:.2f} |",
            f"| per byte | {ours['per_byte']:.3f} |",
            "",
        ]
    if pairs := r.get("minimal_pairs"):
        lines += [
            "| [minimal pairs](../minimal_pairs/README.md), 200 a paradigm, chance 50 | accuracy in % |",
            "|---|---|",
            f"| BLiMP | {100 * pairs['blimp']:.1f} |",
            f"| Zorro | {100 * pairs['zorro']:.1f} |",
            "",
        ]
    if others:
        lines += comparison([r, *others])
    lines += ["![masked-LM loss by step](curve.svg)", ""]
    if masks := r.get("fill_mask"):
        lines += ["| text | candidates |", "|---|---|"]
        for mask in masks:
            words = [f"{c['token']} {c['probability']:.0%}" for c in mask["masks"][0]]
            lines.append(f"| {mask['text']} | {', '.join(words)} |")
        lines.append("")
    lines += [
        f"During training {r['masking_rate']:.0%} of the tokens are masked. Each phase is evaluated on held-out rows of its own",
        "length, so losses of different phases are not comparable:",
        "",
        f"| step | held-out loss, {r['masking_rate']:.0%} masked | accuracy |",
        "|---|---|---|",
        *(
            f"| {h['step']:,} | {h['masked_lm_loss']:.3f} | {h['masked_lm_accuracy']:.1%} |"
            for h in r["heldout"]
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
