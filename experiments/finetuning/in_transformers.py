"""Answer SQuAD's questions with transformers, from the weights that `run.py squad1` has fine-tuned.

    python experiments/finetuning/in_transformers.py

Needs the run of `run.py squad1 --starts minilm`, which it exports. AutoTokenizer cuts contexts into windows, PyTorch computes the
logits, and this file selects the answers: only the data, the weights and the official score are shared
with `bert-jax evaluate`. Writes transformers.jsonl, which README.md quotes.
"""

import json
import os
import subprocess
import tempfile

import torch
import transformers
from run import HERE, RUNS

from bert_jax.benchmarks.squad_score import read, score

WORKDIR = RUNS / "squad1-minilm"
TOKENS, STRIDE, ANSWER_TOKENS = 384, 128, 30  # as in the config, which also cuts questions


def answer(model, tokenizer, question, context):
    """Return the text of the span with the highest sum of logits over all windows."""
    overlap = TOKENS - STRIDE - len(tokenizer(question, add_special_tokens=False)["input_ids"]) - 3
    windows = tokenizer(
        question, context, truncation="only_second", max_length=TOKENS, stride=overlap,
        return_overflowing_tokens=True, return_offsets_mapping=True, padding=True, return_tensors="pt",
    )  # fmt: skip
    del windows["overflow_to_sample_mapping"]
    offsets = windows.pop("offset_mapping")
    with torch.no_grad():
        output = model(**windows)
    best, text = -float("inf"), ""
    for i in range(len(offsets)):
        in_context = torch.tensor([s == 1 for s in windows.sequence_ids(i)])
        start = output.start_logits[i].masked_fill(~in_context, -torch.inf)
        end = output.end_logits[i].masked_fill(~in_context, -torch.inf)
        tokens = torch.arange(len(end)) - torch.arange(len(start))[:, None] + 1
        is_answer = (tokens >= 1) & (tokens <= ANSWER_TOKENS)
        scores = (start[:, None] + end).masked_fill(~is_answer, -torch.inf)
        first, last = divmod(int(scores.argmax()), len(end))
        if scores[first, last] > best:
            best = scores[first, last]
            text = context[offsets[i, first, 0] : offsets[i, last, 1]]
    return text


def main():
    """Export, answer, score, and compare with the answers of bert_jax."""
    ours = json.loads((WORKDIR / "predictions" / "dev" / "predictions.json").read_text())
    dev = RUNS / "squad1" / "dev.json"
    with tempfile.TemporaryDirectory() as folder:
        export = ["bert-jax", "export", "--init", str(WORKDIR), "--out", f"{folder}/model"]
        subprocess.run(export, check=True)
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(f"{folder}/model").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
    theirs = {}
    for article in json.loads(dev.read_text())["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                theirs[qa["id"]] = answer(model, tokenizer, qa["question"], paragraph["context"])
        print(f"{len(theirs):,} of {len(ours):,} questions", flush=True)
    result = {
        "transformers": score(read(dev), theirs, 1),
        "bert_jax": score(read(dev), ours, 1),
        "same_answers": sum(theirs[key] == ours[key] for key in ours) / len(ours),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    (HERE / "transformers.jsonl").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
