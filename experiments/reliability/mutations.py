"""Change one expression at a time and see whether the tests notice.

    python experiments/reliability/mutations.py [--only NAME] [--jobs N]

Every mutation runs the tests of the changed module in a copy of the repository. A mutation that survives
is a fault that no test detects. Results are appended to mutations.jsonl; mutations that already have a
result are not run again.
"""

import argparse
import concurrent.futures
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = pathlib.Path(__file__).with_name("mutations.jsonl")
SECONDS = 900  # a mutation that runs longer is killed, and counts as noticed


class Mutation(NamedTuple):
    """A change of one expression in a module, and the tests that should notice it."""

    module: str
    old: str
    new: str
    tests: str


_STEP = "test_step_program test_train test_evaluate"
_MODEL = "test_model test_attention test_step_program"
_MASK, _LOSS, _OPTIM = "test_masking", "test_losses test_step_program", "test_optim"
_DATA, _CHECK = "test_prepare", "test_checkpoint"
_LOAD = "test_rows test_shards test_evaluate test_shuffle"
MUTATIONS = [
    Mutation("training.step", "jax.random.fold_in(jax.random.key(state.seed), state.step)",
             "jax.random.key(state.seed)", _STEP),
    Mutation("training.step", "key = jax.random.fold_in(dropout_key, i)", "key = dropout_key", _STEP),
    Mutation("training.step", "loss_terms[name][0] / jnp.maximum(normalizer, 1)",
             "loss_terms[name][0] / jnp.maximum(loss_terms[name][1], 1)", _STEP),
    Mutation("training.step", "return jax.tree.map(jnp.add, total, grads_and_terms), None",
             "return grads_and_terms, None", _STEP),
    Mutation("training.step", "functools.partial(jnp.where, stats.is_bad), kept, updated",
             "functools.partial(jnp.where, stats.is_bad), updated, updated",
             f"test_guard {_STEP}"),
    Mutation("training.step", "jnp.where(is_first, 0, total)", "jnp.where(is_first, total, total)", _STEP),
    Mutation("model.bert", "layer_key = fold_in(key, i)", "layer_key = fold_in(key, 0)", _MODEL),
    Mutation("model.bert", "c.attention_dropout, fold_in(key, 0)",
             "c.attention_dropout, fold_in(key, 1)", _MODEL),
    Mutation("model.bert", "x + dropout(self.output(y), c.dropout, fold_in(key, 1))",
             "x + self.output(y)", _MODEL),
    Mutation("model.bert",
             'x + dropout(dense(c, c.hidden, "output", target="output")(wide), c.dropout, key)',
             'x + dense(c, c.hidden, "output", target="output")(wide)', _MODEL),
    Mutation("model.bert", "return dropout(self.norm(x) if c.embedding_norm else x, c.dropout, key)",
             "return self.norm(x) if c.embedding_norm else x", _MODEL),
    Mutation("model.bert", "layout.token_type_ids[..., None] == 0, *segments",
             "layout.token_type_ids[..., None] == 1, *segments", _MODEL),
    Mutation("model.layers", "use_fast_variance=False", "use_fast_variance=True", _MODEL),
    Mutation("model.layers", "0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))",
             "jax.nn.gelu(x, approximate=True)", _MODEL),
    Mutation("model.layers", "excess = padded_vocab_size(config) - config.vocab_size",
             "excess = 0", _MODEL),
    Mutation("model.attention", "query * query.shape[-1] ** -0.5, key)", "query, key)", _MODEL),
    Mutation("model.attention", "masked_score = jnp.finfo(jnp.float32).min", "masked_score = -9.0",
             _MODEL),
    Mutation("model.attention", "scores = jnp.where(mask, scores, masked_score)",
             "scores = jnp.where(mask, scores, masked_score).astype(query.dtype)", _MODEL),
    Mutation("model.attention", "jnp.tril(mask)", "jnp.tril(mask, 1)", _MODEL),
    Mutation("model.attention", "constant_values=-1)", "constant_values=0)", _MODEL),
    Mutation("model.heads", "jnp.float32", "jnp.bfloat16", _MODEL),
    Mutation("model.dropout", "scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) / (1 - rate)",
             "scaled = x / (1 - rate)", "test_dropout test_step_program test_model"),
    Mutation("model.dropout", ">= jnp.uint32(round(rate * 2**32))",
             "> jnp.uint32(round((1 - rate) * 2**32))", "test_dropout test_model"),
    Mutation("training.evaluate", "jax.random.fold_in(jax.random.key(HELDOUT_SEED), i)",
             "jax.random.key(HELDOUT_SEED)", "test_evaluate test_train"),
    Mutation("training.evaluate", "float(s) / float(w) if w else 0.0", "float(s) / max(float(w), 1.0)",
             "test_evaluate test_train test_losses"),
    Mutation("data.loader", "for first in range(0, total, batch_size):",
             "for first in range(0, total - total % batch_size, batch_size):", _LOAD),
    Mutation("data.loader", "shuffled(positions, len(rows), HELDOUT_SEED)", "positions", _LOAD),
    Mutation("data.loader", "rows.read(shuffled(np.arange(first, first + local), len(rows), seed))",
             "rows.read(np.arange(first, first + local) % len(rows))", f"test_train {_LOAD}"),
    Mutation("data.loader", "offset + process * local", "offset", f"test_train {_LOAD}"),
    Mutation("data.loader", "self._format.check(arrays)", "pass", f"test_fuzz_rows {_LOAD}"),
    Mutation("objectives.masking", "round(rate * n)", "int(rate * n)", _MASK),
    Mutation("objectives.masking", "min(max(1, k), maximum, max(n - 2, 0))",
             "min(k, maximum, max(n - 2, 0))", _MASK),
    Mutation("objectives.masking", "| (layout.position_ids == a - 1)", "", _MASK),
    Mutation("objectives.masking", "| (layout.position_ids == n - 1)", "", _MASK),
    Mutation("objectives.masking", "kind < config.mask_fraction + config.same_fraction",
             "kind < config.mask_fraction", _MASK),
    Mutation("objectives.masking", "corrupted = jnp.where(kind < config.mask_fraction, self.mask_id",
             "corrupted = jnp.where(kind <= 1 - config.mask_fraction, self.mask_id", _MASK),
    Mutation("objectives.masking", "0, self.vocab_size, tokens.dtype", "5, self.vocab_size, tokens.dtype",
             _MASK),
    Mutation("objectives.masking", "select_key, kind_key, random_key = jax.random.split(key, 3)",
             "select_key = kind_key = random_key = key", _MASK),
    Mutation("objectives.masking", "has_target = (segment_ids == next_segment_ids) &",
             "has_target =", _MASK),
    Mutation("objectives.masking", "start = jax.lax.cummax(start, axis=1)", "pass", _MASK),
    Mutation("objectives.losses", "jax.nn.logsumexp(logits, axis=-1) -",
             "jax.nn.logsumexp(logits.astype(jnp.bfloat16), axis=-1) -", _LOSS),
    Mutation("objectives.losses", "return jnp.sum(loss * weights), jnp.sum(weights)",
             "return jnp.sum(loss), jnp.sum(weights)", f"{_LOSS} test_evaluate"),
    Mutation("objectives.losses", "labels < logits.shape[-1]", "labels <= logits.shape[-1]", _LOSS),
    Mutation("objectives.masked_lm", 'batch["label"] != rows.NO_LABEL',
             'batch["label"] >= rows.NO_LABEL', "test_evaluate test_train"),
    Mutation("training.optim", "updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon)",
             "updates = jax.tree.map(lambda m, v: m / jnp.sqrt(v + epsilon)", _OPTIM),
    Mutation("training.optim", "beta2 * v + (1 - beta2) * g * g", "beta2 * v + (1 - beta1) * g * g", _OPTIM),
    Mutation("training.optim", "optax.add_decayed_weights(config.weight_decay, decay_mask)",
             "optax.add_decayed_weights(config.weight_decay)", _OPTIM),
    Mutation("training.optim", "layer_decay ** (layers + 1 - depth)", "layer_decay ** (layers - depth)",
             f"{_OPTIM} test_finetuning"),
    Mutation("training.optim", "if frozen and depth <= frozen", "if frozen and depth < frozen",
             f"{_OPTIM} test_finetuning"),
    Mutation("data.instances", "rng.random() < 0.5", "rng.random() < 0.4", _DATA),
    Mutation("data.instances", "IS_NEXT, IS_RANDOM = 0, 1", "IS_NEXT, IS_RANDOM = 1, 0",
             f"{_DATA} test_model"),
    Mutation("data.instances", "start = middle  # reuse", "start = end  # reuse", _DATA),
    Mutation("data.instances", "if entry[0] != text_hash:", "if True:", _DATA),
    Mutation("data.instances", "return (room + 1) // 2, room // 2", "return room // 2, room // 2", _DATA),
    Mutation("data.instances", "front = rng.getrandbits(excess).bit_count() if excess else 0",
             "front = 0", _DATA),
    Mutation("data.prepare", "train[split]\n", "train[split][:0]\n", _DATA),
    Mutation("runs.checkpoint", "if stats[name].size != entries[name][0]:", "if False:", _CHECK),
    Mutation("runs.checkpoint", "return None if computed == checksum else", "return None if True else",
             _CHECK),
    Mutation("runs.checkpoint", 'manifest["step"] != int(folder.name)', "False", _CHECK),
    Mutation("runs.checkpoint", "max(scored)[1]", "min(scored)[1]", _CHECK),
    Mutation("runs.workdir", 'lines = [line for line in read_steps(path) if line["step"] <= last_step]',
             "lines = read_steps(path)", f"{_CHECK} test_train"),
    Mutation("tasks.metrics", "pos_label=1", "pos_label=0", "test_glue test_classification"),
    Mutation("tasks.squad_score", "if normalize_answer(", "if (", "test_squad"),
    Mutation("training.guard", "config.sigmas * jnp.maximum(deviation", "config.sigmas * (0 * deviation",
             "test_guard"),
]  # fmt: skip


def run(mutation: Mutation) -> dict:
    """Return the result of a mutation: `noticed`, by which test, in how many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("bert_jax", "configs", "experiments", "launch", "tests", "pyproject.toml"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        path = copy / "bert_jax" / f"{mutation.module.replace('.', '/')}.py"
        text = path.read_text()
        if mutation.old not in text:
            raise SystemExit(f"{mutation.module} has no {mutation.old!r}: correct the list")
        path.write_text(text.replace(mutation.old, mutation.new))
        tests = [f"tests/{name}.py" for name in mutation.tests.split()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--tb=line",
            "-m",
            "not slow",
            *tests,
        ]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            status, output = 1, "FAILED (time)"
    failed = next(
        (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), ""
    )
    if status not in (0, 1, 2):
        raise SystemExit(output[-2000:])
    return {
        **{key: getattr(mutation, key) for key in ("module", "old", "new")},
        "noticed": status != 0,
        "by": failed.partition(" ")[2].partition(" - ")[0],
        "seconds": round(time.monotonic() - begin),
    }


def main() -> None:
    """Run the mutations that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="module")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {(line["module"], line["old"], line["new"]) for line in map(json.loads, lines)}
    missing = [m for m in MUTATIONS if m[:3] not in known and options.only in m.module]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, missing):
            print(
                f"{result['module']}: {result['new']}: {result['by'] or 'NOT NOTICED'}", flush=True
            )
            with RESULTS.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
