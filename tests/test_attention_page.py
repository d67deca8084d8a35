"""Attention maps: weights match Hugging Face Transformers, head statistics, HTML page, picture."""

import base64
import contextlib
import io

import jax
import matplotlib.image
import numpy as np
import pytest
import torch
import transformers

from bert_jax import cli
from bert_jax.convert.source import open_model
from bert_jax.data.vocabulary import SPECIAL
from bert_jax.errors import UserError
from bert_jax.inference.attention_maps import (
    AttentionMapper,
    AttentionMaps,
    entropy,
    mean_distance,
    rollout,
)
from bert_jax.tools.report import attention as report
from tests.helpers import checkpoints

WORDS = (*SPECIAL, *"the cat sat on mat un ##s ##t . , script / < > ' \" & $".split())
TEXT, TEXT_B = "the cat uns on", "the <script> '\"&$"


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """A random Transformers `BertModel` and the folder it is saved in."""
    model = checkpoints.torch_model(
        "BertModel", vocab_size=len(WORDS), num_hidden_layers=3, num_attention_heads=4,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.3)  # attention is then far from uniform
    return model, checkpoints.save_pretrained(model, tmp_path_factory.mktemp("theirs"), WORDS)


@pytest.fixture(scope="session")
def maps(theirs):
    return AttentionMapper(open_model(str(theirs[1])))(TEXT, TEXT_B)


# --- Weights --------------------------------------------------------------------------------------


def test_attention_weights_match_transformers_in_every_layer(theirs, maps):
    model, folder = theirs
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXT, TEXT_B, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
    assert maps.texts == (TEXT, TEXT_B)
    assert maps.tokens == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert maps.tokens[:7] == ["[CLS]", "the", "cat", "un", "##s", "on", "[SEP]"]
    np.testing.assert_array_equal(maps.segments, inputs["token_type_ids"][0])
    assert maps.probabilities.dtype == np.float32
    assert maps.probabilities.shape == (3, 4, len(maps.tokens), len(maps.tokens))
    for ours, layer in zip(maps.probabilities, expected, strict=True):
        np.testing.assert_allclose(ours, layer[0], rtol=0, atol=1e-5)
    assert np.ptp(maps.probabilities) > 0.5, "all heads look everywhere: nothing was tested"


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True, "next_sentence": False},
        {"attention": "splash", "layer_loop": "scanned", "remat": "full"},
        {"segments": 0, "norm.final": True, "next_sentence": False, "masked_lm": False},
        {"segments": 1, "dtype": "bfloat16"},
    ],
    ids=["causal", "kernel", "no segments", "one segment"],
)
def test_attention_maps_of_model_variants(tmp_path, changes):
    config = checkpoints.small_config(layers=2, **changes)
    params = checkpoints.random_params(config)
    params = jax.tree.map(lambda x: 3 * x, params)  # attention is then far from uniform
    run = checkpoints.write_run(tmp_path / "run", config, params, checkpoints.WORDS)
    result = AttentionMapper(open_model(str(run)))(TEXT, TEXT_B)
    assert result.segments.sum() == len(result.tokens) - 7
    weights = result.probabilities
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    later = np.triu(np.ones(weights.shape[-2:], bool), 1)
    assert (weights[..., later].max() == 0) == bool(changes.get("causal"))
    assert np.ptp(weights[:, :, -1]) > 0.1


def test_invalid_texts_are_rejected(theirs):
    mapper = AttentionMapper(open_model(str(theirs[1])))

    for texts, key in (
        ([""], "'' has no word piece"),
        (["the cat", " \t"], r"' \\t' has no word piece"),
        (["cat " * 23], "25 tokens, the model takes 24"),
        (["cat " * 10, "cat " * 12], "25 tokens"),
    ):
        with pytest.raises(UserError, match=key):
            mapper(*texts)
    assert len(mapper("cat " * 22).tokens) == 24
    assert mapper("the [MASK]").tokens == ["[CLS]", "the", "[MASK]", "[SEP]"]


# --- Head statistics ------------------------------------------------------------------------------


def test_entropy_and_mean_distance_match_hand_computation():
    halves = [[0.5, 0.5, 0], [1, 0, 0], [0.25, 0.25, 0.5]]
    heads = np.array([[halves, np.eye(3), np.full((3, 3), 1 / 3)]], np.float32)
    entropies = [(np.log(2) + 0 + 1.5 * np.log(2)) / 3, 0, np.log(3)]
    np.testing.assert_allclose(entropy(heads), [entropies], atol=1e-6)
    # Of the first head, row by row: 0.5 · 1, 1 · 1, 0.25 · 2 + 0.25 · 1.
    np.testing.assert_allclose(mean_distance(heads), [[2.25 / 3, 0, 8 / 9]], atol=1e-6)


def test_rollout_matches_hand_computation():
    # Two layers, whose means over heads are [[1, 0], [1, 0]] and [[0, 1], [0.5, 0.5]].
    first = [[[1, 0], [1, 0]], [[1, 0], [1, 0]]]
    second = [[[0, 1], [0, 1]], [[0, 1], [1, 0]]]
    result = rollout(np.array([first, second], np.float32))
    below = np.array([[1, 0], [0.5, 0.5]])
    above = np.array([[0.5, 0.5], [0.25, 0.75]])
    np.testing.assert_allclose(result, [below, above @ below], atol=1e-6)
    np.testing.assert_allclose(result[1], [[0.75, 0.25], [0.625, 0.375]], atol=1e-6)


# --- The page -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def written(theirs, tmp_path_factory):
    """Path of the page that `bert-jax attention` writes."""
    out = tmp_path_factory.mktemp("out") / "deep" / "a.html"
    command = ["attention", "--init", str(theirs[1]), "--text", TEXT, "--text-b", TEXT_B]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main([*command, "--rollout", "--out", str(out)]) == 0
    assert printed.getvalue().startswith(f"{out}, {out.with_suffix('.png')}: ")
    assert sorted(out.parent.iterdir()) == [out, out.with_suffix(".png")]
    return out


@pytest.fixture
def opened(written, visit):
    return ready(visit(written))


def ready(opened):
    opened.wait_for_selector("body[data-ready]", state="attached")
    return opened


def alphas(opened, selector):
    """Return the alpha channel of a canvas: [height, width], with values from 0 to 255."""
    url = opened.locator(selector).evaluate("canvas => canvas.toDataURL()")
    png = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    return np.rint(255 * matplotlib.image.imread(io.BytesIO(png)))[..., 3]


def cell(layer, column, table="maps"):
    return f"#{table} td[data-layer='{layer}'][data-column='{column}']"


def with_rollout(maps):
    """Return the maps of every layer's heads, their mean and the rollout."""
    heads = maps.probabilities
    return np.concatenate([heads, heads.mean(1)[:, None], rollout(heads)[:, None]], 1)


def test_page_shows_every_attention_map(opened, maps):
    heads, shown = maps.probabilities, with_rollout(maps)
    titles = opened.locator("#maps thead th").all_inner_texts()
    assert titles == ["", "head 1", "head 2", "head 3", "head 4", "mean", "rollout"]
    for layer, row in enumerate(shown):
        for column, weights in enumerate(row):
            result = alphas(opened, f"{cell(layer, column)} canvas")
            np.testing.assert_allclose(result, 255 * np.sqrt(weights), atol=0.51)
    for name, figure, digits in (("entropy", entropy, 2), ("distance", mean_distance, 1)):
        actual = opened.locator(f"#{name} td").all_inner_texts()
        assert actual == [f"{x:.{digits}f}" for x in figure(heads).ravel()]


def test_html_in_tokens_is_escaped(tmp_path, visit):
    odd = ["<b>x</b>", "&amp;", "</script><script>document.title='lost'</script>", "\"'"]
    maps = synthetic(4)._replace(tokens=odd, texts=(odd[2], odd[1]))
    opened = ready(visit(report.write(maps, odd[2], str(tmp_path / "a.html"))[0]))
    assert opened.locator("#to li").all_inner_texts() == odd
    assert opened.title() == f"Attention: {odd[2]} / {odd[1]}"
    assert opened.inner_text("p.quiet >> nth=0").startswith(odd[2])


def synthetic(tokens, layers=1, heads=1, seen=()):
    """Return maps where each token attends to itself, except for the pairs (from, to) in `seen`."""
    weights = np.tile(np.eye(tokens, dtype=np.float32), (layers, heads, 1, 1))
    for i, j in seen:
        weights[..., i, :] = np.eye(tokens, dtype=np.float32)[j]
    pieces = [f"##{i}" for i in range(tokens)]
    return AttentionMaps(("a",), pieces, np.zeros(tokens, np.int32), weights)


# --- The picture ----------------------------------------------------------------------------------


def test_picture_contains_every_map():
    maps = synthetic(9, layers=2, heads=3, seen=[(0, 5)])
    figure = report.picture(maps, r"no $\formula{$", True)
    (axes,) = figure.axes
    shown = axes.images[0].get_array()
    for layer, column in np.ndindex(2, 5):
        part = shown[9 * layer : 9 * (layer + 1), 9 * column : 9 * (column + 1)]
        np.testing.assert_allclose(part, np.sqrt(with_rollout(maps)[layer, column]))
    for axis, count in ((axes.yaxis, 2), (axes.xaxis, 5)):
        assert [text.get_text() for text in axis.get_ticklabels()] == [*maps.tokens] * count
        assert [*axis.get_ticklocs()] == [*range(9 * count)]  # beside its row, below its column
    above, beside = axes.child_axes
    assert [text.get_text() for text in above.get_xticklabels()][2:] == [
        "head 3",
        "mean",
        "rollout",
    ]
    assert [text.get_text() for text in beside.get_yticklabels()] == ["layer 1", "layer 2"]
    assert r"no $\formula{$" in figure.get_suptitle()


def test_output_paths_and_invalid_out_options(theirs, tmp_path, capsys):
    assert [path.name for path in report.paths("a.b.svg")] == ["a.b.html", "a.b.svg"]
    for out in ("a", "a.jpg", ".html", ""):
        with pytest.raises(UserError, match=r"\.html, \.png, \.svg or \.pdf"):
            report.paths(out)
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        report.write(synthetic(3), "m", str(tmp_path / "a.html"))
    _, picture = report.write(synthetic(3), "m", str(tmp_path / "b.svg"))
    assert "<svg" in picture.read_text()
    command = ["attention", "--init", str(theirs[1]), "--text", "the", "--out"]
    assert cli.main([*command, "a.txt"]) == cli.EXIT_USER_ERROR
    assert "--out a.txt" in capsys.readouterr().err
