"""Write this folder's results.json, curve.svg and README.md from a finished run.

python experiments/mini/record.py --workdir runs/mini --rows rows
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from bert_jax import workdir
from bert_jax.data.rows import read_manifest
from bert_jax.tools.report import runs

FOLDER = pathlib.Path(__file__).parent
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
        [sys.executable, *command, "--workdir", folder, *TEXTS],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def evaluate_all(folder: str) -> dict:
    """Return the metrics of `bert-jax evaluate --all`."""
    command = ["-c", "from bert_jax.cli import main; main()", "evaluate", "--all", "--json"]
    done = subprocess.run(
        [sys.executable, *command, "--workdir", folder], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    """Collect the numbers, and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", default="runs/mini")
    parser.add_argument("--rows", default="rows")
    options = parser.parse_args()
    folder = pathlib.Path(options.workdir)
    lines = workdir.read_lines(folder / "metrics.jsonl")
    speed = workdir.read_lines(folder / "speed.jsonl")
    starts = workdir.read_lines(folder / "starts.jsonl")
    manifest = read_manifest(options.rows)
    rates = sorted(line["real_tokens_per_second"] for line in speed)
    results = {
        "starts": starts,
        "vocabulary": manifest.vocab_size,
        "tokens": manifest.tokens,
        "sequences": manifest.sequences,
        "train_rows": manifest.train.rows,
        "train_documents": manifest.train.documents,
        "heldout_rows": manifest.heldout.rows,
        "heldout_documents": manifest.heldout.documents,
        "fill": manifest.train.fill_fraction,
        "training_minutes": sum(line["seconds"] for line in speed) / 60,
        "real_tokens_per_second": {
            "median": statistics.median(rates),
            "least": rates[0],
            "most": rates[-1],
        },
        "heldout": [line for line in lines if line["split"] == "heldout"],
        "heldout_all_rows": evaluate_all(options.workdir),
        "fill_mask": fill_masks(options.workdir),
    }
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    runs.loss_curve([options.workdir], str(FOLDER / "curve.svg"))
    (FOLDER / "README.md").write_text(page(results))


def page(r: dict) -> str:
    """Return the README for the results."""
    heldout = "\n".join(
        f"| {h['step']:,} | {h['masked_lm_loss']:.3f} | {h['masked_lm_perplexity']:.1f} | "
        f"{h['masked_lm_accuracy']:.1%} | {h['next_sentence_accuracy']:.1%} |"
        for h in r["heldout"]
    )
    masks = "\n".join(
        f"| {m['text']} | "
        + ", ".join(f"{c['token']} {c['probability']:.0%}" for c in m["masks"][0])
        + " |"
        for m in r["fill_mask"]
    )
    first, *later = r["starts"]
    resumed = "; ".join(f"started again at step {s['step']:,}" for s in later) or "not interrupted"
    rate, every = r["real_tokens_per_second"], r["heldout_all_rows"]
    return f"""# BERT-mini (L4 H256 A4) on Wikipedia and novels

[`run.sh`](run.sh) trains a vocabulary of {r["vocabulary"]:,} word pieces, packs the text into rows and
pretrains; [`record.py`](record.py) wrote this page from the run ([`results.json`](results.json)).

    {first["command"]}

![masked-LM loss by step](curve.svg)

- **Rows**: {r["train_rows"]:,} of T={r["tokens"]} with up to {r["sequences"]} sequences from
  {r["train_documents"]:,} documents, {r["fill"]:.1%} of their tokens real. Held out:
  {r["heldout_rows"]:,} rows from {r["heldout_documents"]:,} other documents.
- **Machine**: {first["devices"]}, JAX {first["versions"]["jax"]}, Python {first["python"]}.
- **Interrupted**: killed with SIGKILL on the way; {resumed}.
- **Speed**: median {rate["median"]:,.0f} real tokens/s over windows of 10 steps (least
  {rate["least"]:,.0f}, most {rate["most"]:,.0f}; the machine was shared with other work),
  {r["training_minutes"]:.0f} minutes of steps in all.

| step | held-out masked-LM loss | perplexity | accuracy | next-sentence accuracy |
|---|---|---|---|---|
{heldout}

On all held-out rows, checkpoint {every["step"]:,}: masked-LM loss {every["masked_lm_loss"]:.3f},
perplexity {every["masked_lm_perplexity"]:.1f}, accuracy {every["masked_lm_accuracy"]:.1%};
next-sentence accuracy {every["next_sentence_accuracy"]:.1%}.

| text | candidates |
|---|---|
{masks}
"""


if __name__ == "__main__":
    main()
