"""Write results.json, curve.svg and README.md of this folder, or of another one, from a finished run.

python experiments/mini/record.py --workdir runs/mini
python experiments/mini/record.py --workdir runs/base --page experiments/base
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.with_name("miniberta")))

import measure  # noqa: E402

from bert_jax import workdir  # noqa: E402
from bert_jax.data.rows import read_manifest  # noqa: E402
from bert_jax.tools.report import curves, runs  # noqa: E402

TEXT = pathlib.Path(os.environ.get("BERT_JAX_DATA", ""), "text")
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


def main() -> None:
    """Collect the numbers, and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", default="runs/mini")
    parser.add_argument("--page", type=pathlib.Path, default=FOLDER, help="folder of the page")
    options = parser.parse_args()
    folder = pathlib.Path(options.workdir)
    config = workdir.read_config(folder)
    lines = workdir.read_lines(folder / "metrics.jsonl")
    progress = curves.clock(curves.read_speed(folder))
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
        "heldout": [line for line in lines if line["split"] == "heldout"],
        "losses": measure.units(measure.heldout_loss(options.workdir, rows[-1]), SOURCES, rows[-1]),
        "fill_mask": fill_masks(options.workdir),
    }
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (options.page / "results.json").write_text(text + "\n")
    runs.loss_curve([options.workdir], str(options.page / "curve.svg"))
    (options.page / "README.md").write_text(page(results))


def page(r: dict) -> str:
    """Return the README for the results."""
    heldout = "\n".join(
        f"| {h['step']:,} | {h['masked_lm_loss']:.3f} | {h['masked_lm_accuracy']:.1%} |"
        for h in r["heldout"]
    )
    masks = "\n".join(
        f"| {m['text']} | "
        + ", ".join(f"{c['token']} {c['probability']:.0%}" for c in m["masks"][0])
        + " |"
        for m in r["fill_mask"]
    )
    starts = r["starts"]
    differ = len({start["command"].removesuffix(" --resume force") for start in starts}) > 1
    schedules = " Each start follows the learning-rate schedule of its own command." * differ
    commands = "\n".join(f"    {start['command']}    # step {start['step']:,}" for start in starts)
    lengths = ", ".join(str(phase["tokens"]) for phase in r["phases"])
    ours = r["losses"]
    return f"""# BERT-mini (L4 H256 A4) on Wikipedia and novels

The config `mini` on {r["real_tokens"] / 1e6:.1f} million tokens of Wikipedia and novels, a corpus of {ours["words"] / 1e6:.1f} million words.
[`run.sh`](run.sh) trains a vocabulary of 8,192 word pieces, prepares rows and pretrains; [`record.py`](record.py) writes this page and
[`results.json`](results.json) from the finished run. The run was started and resumed at these steps:

{commands}

{r["steps"]:,} steps of 2,048 tokens on rows of T={lengths}, in this order: {r["real_tokens"] / 1e6:.1f} million tokens
in {r["training_minutes"]:.0f} minutes on {r["cores"]} CPU cores, which other work shared at times.{schedules}

| held-out masked-LM loss, 15% masked | nats |
|---|---|
| per word piece | {ours["per_piece"]:.2f} |
| per word | {ours["per_word"]:.2f} |
| per byte | {ours["per_byte"]:.3f} |

![masked-LM loss by step](curve.svg)

| text | candidates |
|---|---|
{masks}

During training 40% of the tokens are masked. Each phase is evaluated on held-out rows of its own length, so losses of
different phases are not comparable:

| step | held-out loss, 40% masked | accuracy |
|---|---|---|
{heldout}
"""


if __name__ == "__main__":
    main()
