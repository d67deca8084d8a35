"""Answer SQuAD's questions with transformers, from the weights that `run.py squad1` has fine-tuned.

    python experiments/paper/more/in_transformers.py [squad1-all]

Needs the run of `run.py squad1 --starts minilm` (or `squad1-all`), which it exports. AutoTokenizer cuts
contexts into windows, PyTorch computes the logits, and this file selects the answers: only the data, the
weights and the official score are shared with `bert-jax evaluate`. Writes transformers.jsonl, which
README.md quotes.
"""

import argparse
import json
import os
import subprocess
import tempfile

import torch
import transformers
from run import HERE, RUNS, keep_line

from bert_jax.tasks.squad_score import read, score

TOKENS, STRIDE, ANSWER_TOKENS = 384, 128, 30  # as in the config, which also cuts questions


def cut(tokenizer, question, context):
    """Return the windows of a question and its context, with the offsets of tokens."""
    overlap = TOKENS - STRIDE - len(tokenizer(question, add_special_tokens=False)["input_ids"]) - 3
    return tokenizer(
        question, context, truncation="only_second", max_length=TOKENS, stride=overlap,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip


def answers(model, tokenizer, questions, context):
    """Return, for each question, the text of the span with the highest sum of logits over all windows."""
    windows, offsets, numbers = [], [], []
    for i, question in enumerate(questions):
        encoded = cut(tokenizer, question, context)
        for j in range(len(encoded["input_ids"])):
            windows.append({key: encoded[key][j] for key in tokenizer.model_input_names})
            in_context = torch.tensor([s == 1 for s in encoded.sequence_ids(j)])
            offsets.append((in_context, encoded["offset_mapping"][j]))
            numbers.append(i)
    with torch.no_grad():
        output = model(**tokenizer.pad(windows, return_tensors="pt").to(model.device))
    best = [(-float("inf"), "")] * len(questions)
    logits = zip(output.start_logits.cpu(), output.end_logits.cpu(), strict=True)
    for i, (in_context, spans), (start, end) in zip(numbers, offsets, logits, strict=True):
        size = len(in_context)
        start = start[:size].masked_fill(~in_context, -torch.inf)
        end = end[:size].masked_fill(~in_context, -torch.inf)
        tokens = torch.arange(size) - torch.arange(size)[:, None] + 1
        is_answer = (tokens >= 1) & (tokens <= ANSWER_TOKENS)
        scores = (start[:, None] + end).masked_fill(~is_answer, -torch.inf)
        first, last = divmod(int(scores.argmax()), size)
        text = context[spans[first][0] : spans[last][1]]
        best[i] = max(best[i], (float(scores[first, last]), text), key=lambda pair: pair[0])
    return [text for _, text in best]


def answers_of(model, tokenizer, path):
    """Return the answers to all questions of a file by their ids."""
    texts_by_id = {}
    for article in json.loads(path.read_text())["data"]:
        for paragraph in article["paragraphs"]:
            ids, questions = ([qa[key] for qa in paragraph["qas"]] for key in ("id", "question"))
            texts = answers(model, tokenizer, questions, paragraph["context"])
            texts_by_id |= dict(zip(ids, texts, strict=True))
        print(f"{len(texts_by_id):,} questions answered", flush=True)
    return texts_by_id


def main():
    """Export, answer, score, and compare with the answers of bert_jax."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("set", nargs="?", default="squad1", choices=("squad1", "squad1-all"))
    name = parser.parse_args().set
    workdir = RUNS / f"{name}-minilm"
    ours = json.loads((workdir / "predictions" / "dev" / "predictions.json").read_text())
    dev = RUNS / name / "dev.json"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        export = ["bert-jax", "export", "--init", str(workdir), "--out", f"{folder}/model"]
        subprocess.run(export, check=True)
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(f"{folder}/model")
        model = model.eval().to(device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
    theirs = answers_of(model, tokenizer, dev)
    result = {
        "set": name,
        "transformers": score(read(dev), theirs, 1),
        "bert_jax": score(read(dev), ours, 1),
        "same_answers": sum(theirs[key] == ours[key] for key in ours) / len(ours),
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if device == "cuda" else "1 cpu",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    keep_line(HERE / "transformers.jsonl", result, "set")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
