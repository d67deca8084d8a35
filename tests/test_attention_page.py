"""Attention maps: weights match Hugging Face Transformers, head statistics, HTML page, picture."""

import base64
import contextlib
import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import torch
import transformers

from bert_jax import cli
from bert_jax.config.schema import ModelConfig
from bert_jax.convert.source import open_model
from bert_jax.data.wordpiece import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.inference.attention_maps import (
    AttentionMapper,
    AttentionMaps,
    entropy,
    mean_distance,
    rollout,
)
from bert_jax.model import attention as attention_lib
from bert_jax.model.bert import init_params
from bert_jax.tools.report import attention as report
from tests.helpers import checkpoints

WORDS = (*SPECIAL, *"the cat sat on mat un ##s ##t . , script / < > ' \" & $".split())
TEXT, TEXT_B = "the cat uns on", "the <script> '\"&$"
MODEL = ModelConfig(
    layers=2, hidden=12, heads=3, feed_forward=20, vocab_size=len(WORDS), positions=24,
    dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """A random Transformers `BertModel` and the folder it is saved in."""
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=12, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=20, max_position_embeddings=24, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7, generator=generator)
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)})
    tokenizer.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="session")
def maps(theirs):
    return AttentionMapper(open_model(str(theirs[1])))(TEXT, TEXT_B)


def write_run(folder, model):
    """Write a run with random parameters, scaled up so that attention is far from uniform."""
    params = init_params(model, jax.random.key(0))
    return checkpoints.write_run(
        folder, model, jax.tree.map(lambda x: np.asarray(20 * x), params), WORDS
    )


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


@pytest.mark.parametrize("causal", [False, True])
def test_weights_times_values_equal_attention_output(causal):
    rng = np.random.default_rng(0)
    query, key, value = jnp.asarray(2 * rng.standard_normal((3, 2, 9, 2, 4)), jnp.float32)
    sequence = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    result = np.asarray(attention_lib.probabilities(query, key, sequence, causal))
    assert result.dtype == np.float32
    expected = attention_lib.attention(query, key, value, sequence, 0.0, None, "xla", causal=causal)
    np.testing.assert_allclose(np.einsum("bntu,bunk->btnk", result, value), expected, atol=1e-6)
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-6)
    apart = np.asarray(sequence)[:, :, None] != np.asarray(sequence)[:, None, :]
    later = np.triu(np.ones((9, 9), bool), 1)
    unseen = np.broadcast_to((apart | (causal & later))[:, None], result.shape)
    assert (result[unseen] == 0).all()
    assert (result[~unseen] > 0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True, "next_sentence": False},
        {"attention": "splash", "layer_loop": "scanned", "remat": "full"},
        {"segments": 0, "final_norm": True, "next_sentence": False, "masked_lm": False},
        {"segments": 1, "dtype": "bfloat16"},
    ],
    ids=["causal", "kernel", "no segments", "one segment"],
)
def test_attention_maps_of_model_variants(tmp_path, changes):
    run = write_run(tmp_path / "run", dataclasses.replace(MODEL, **changes))
    result = AttentionMapper(open_model(str(run)))(TEXT, TEXT_B)
    assert result.segments.sum() == len(result.tokens) - 7
    weights = result.probabilities
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    later = np.triu(np.ones(weights.shape[-2:], bool), 1)
    assert (weights[..., later].max() == 0) == bool(changes.get("causal"))
    assert np.ptp(weights[:, :, -1]) > 0.1


def test_invalid_texts_give_one_line_errors(theirs):
    mapper = AttentionMapper(open_model(str(theirs[1])))

    def refusal(*texts):
        with pytest.raises(UserError) as error:
            mapper(*texts)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refusal("") == "'' has no word piece: give a text with words"
    assert refusal("the cat", " \t") == r"' \t' has no word piece: give a text with words"
    assert refusal("cat " * 23) == (
        "'cat cat cat cat cat cat cat cat cat cat '… has 25 tokens, the model takes 24: shorten it"
    )
    assert "has 25 tokens" in refusal("cat " * 10, "cat " * 12)
    assert len(mapper("cat " * 22).tokens) == 24
    assert mapper("the [MASK]").tokens == ["[CLS]", "the", "[MASK]", "[SEP]"]


# --- Head statistics ------------------------------------------------------------------------------


def test_entropy_matches_hand_computation():
    halves = [[0.5, 0.5, 0], [1, 0, 0], [0.25, 0.25, 0.5]]
    expected = (np.log(2) + 0 + 1.5 * np.log(2)) / 3
    heads = np.array([[halves, np.eye(3), np.full((3, 3), 1 / 3)]], np.float32)
    np.testing.assert_allclose(entropy(heads), [[expected, 0, np.log(3)]], atol=1e-6)


def test_mean_distance_matches_hand_computation():
    # Row by row: 0.5 · 1, 1 · 1, 0.25 · 2 + 0.25 · 1.
    halves = [[0.5, 0.5, 0], [1, 0, 0], [0.25, 0.25, 0.5]]
    heads = np.array([[halves, np.eye(3), np.eye(3)[::-1]]], np.float32)
    np.testing.assert_allclose(mean_distance(heads), [[2.25 / 3, 0, 4 / 3]], atol=1e-6)


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
    """Path of the page that `bert-jax attention` writes, and the standard output of the command."""
    out = tmp_path_factory.mktemp("out") / "deep" / "a.html"
    command = ["attention", "--init", str(theirs[1]), "--text", TEXT, "--text-b", TEXT_B]
    messages = []
    with contextlib.redirect_stdout(
        type("", (), {"write": messages.append, "flush": lambda *_: None})
    ):
        assert cli.main([*command, "--rollout", "--out", str(out)]) == 0
    return out, "".join(messages)


@pytest.fixture
def opened(written, visit):
    return ready(visit(written[0]))


def ready(opened):
    opened.wait_for_selector("body[data-ready]", state="attached")
    return opened


def pixels(opened, selector):
    """Return the RGBA pixels of a canvas: [height, width, 4], with values from 0 to 255."""
    url = opened.locator(selector).evaluate("canvas => canvas.toDataURL()")
    png = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    return np.rint(255 * matplotlib.image.imread(io.BytesIO(png)))


def alphas(opened, selector):
    return pixels(opened, selector)[..., 3]


def cell(layer, column, table="maps"):
    return f"#{table} td[data-layer='{layer}'][data-column='{column}']"


def test_command_prints_the_files_it_wrote(written):
    out, result = written
    count = len(Vocabulary(WORDS, True).encode(TEXT, TEXT_B))
    picture = out.with_suffix(".png")
    assert result == f"{out}, {picture}: 3 layers of 4 heads, {count} tokens\n"
    assert sorted(out.parent.iterdir()) == [out, picture]


def test_page_shows_every_attention_map(opened, maps):
    heads = maps.probabilities
    shown = np.concatenate([heads, heads.mean(1)[:, None], rollout(heads)[:, None]], 1)
    titles = opened.locator("#maps thead th").all_inner_texts()
    assert titles == ["", "head 1", "head 2", "head 3", "head 4", "mean", "rollout"]
    for layer, row in enumerate(shown):
        for column, weights in enumerate(row):
            result = alphas(opened, f"{cell(layer, column)} canvas")
            np.testing.assert_allclose(result, 255 * np.sqrt(weights), atol=0.51)
    for name, figure, digits in (("entropy", entropy, 2), ("distance", mean_distance, 1)):
        actual = opened.locator(f"#{name} td").all_inner_texts()
        assert actual == [f"{x:.{digits}f}" for x in figure(heads).ravel()]


def test_hovering_a_token_shows_its_attention(opened, maps):
    weights = maps.probabilities[1, 2]
    opened.locator(cell(1, 2)).click()
    assert opened.inner_text("#weights") == ""
    count, items = len(weights), opened.locator("#from li")
    lines = alphas(opened, "#between")
    tall = len(lines) / count
    assert all(lines[int((i + 0.5) * tall) - 1 :][:3, 2].any() for i in range(count))
    clear = 0
    for i, row in list(enumerate(weights))[::2]:
        items.nth(i).hover()
        result = opened.inner_text("#weights")
        order = np.argsort(-row)
        if row[order[0]] - row[order[1]] > 0.01:
            clear += 1
            top = re.escape(
                f"{maps.tokens[i]} ({i}) attends to {maps.tokens[order[0]]} ({order[0]})"
            )
            percent = float(re.match(rf"{top} ([\d.]+)%", result)[1])
            assert abs(percent - 100 * row[order[0]]) < 1
        assert result.count("%") == 5
        from_row = np.nonzero(alphas(opened, "#between")[:, 2])[0] / tall - 0.5
        assert len(from_row)
        assert np.abs(from_row - i).max() < 0.2, "a line of another word piece"
        shares = opened.locator("#to li").evaluate_all("x => x.map(y => y.style.cssText)")
        shares = [float(re.search(r"--share: ([\d.e-]+)", share)[1]) for share in shares]
        np.testing.assert_allclose(shares, np.sqrt(row), atol=0.51 / 255)
    assert clear >= 4
    assert opened.locator("#from li[aria-selected=true]").count() == 1
    opened.mouse.move(0, 0)
    assert opened.inner_text("#weights") == ""
    np.testing.assert_array_equal(alphas(opened, "#between"), lines)


def test_tokens_are_selected_with_the_keyboard(opened, maps):
    def selected():
        return opened.locator("#from li[aria-selected=true]").all_inner_texts()

    opened.locator("#from li").first.focus()
    assert selected() == ["0 [CLS]"]
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowDown")
    assert selected() == ["2 cat"]
    opened.keyboard.press("Escape")
    assert selected() == []
    opened.keyboard.press("ArrowUp")
    assert selected() == ["1 the"]
    opened.keyboard.press("End")
    opened.keyboard.press("ArrowDown")
    assert selected() == [f"{len(maps.tokens) - 1} [SEP]"]
    assert opened.inner_text("#weights").startswith(f"[SEP] ({len(maps.tokens) - 1}) attends to ")


def test_hovering_the_large_map_names_the_cell(opened, maps):
    opened.locator(cell(0, 3)).click()
    weights = maps.probabilities[0, 3]
    opened.locator("#large").scroll_into_view_if_needed()
    box = opened.locator("#large").bounding_box()
    side = opened.evaluate("CELL")
    start = opened.evaluate("margin")
    i, j = 7, 2
    at = [start + (k + 0.5) * side for k in (j, i)]
    opened.mouse.move(box["x"] + at[0], box["y"] + at[1])
    result = opened.inner_text("#weights")
    assert result.startswith(f"{maps.tokens[i]} ({i}) attends to")
    percent = float(re.search(rf"; ([\d.]+)% to {maps.tokens[j]} \({j}\)$", result)[1])
    assert abs(percent - 100 * weights[i, j]) < 1
    inside = alphas(opened, "#large")[int(start) :, int(start) :]
    assert (inside > 0).mean() > 0.9


def test_heads_are_selected_with_the_keyboard_and_in_every_table(opened, maps):
    def chosen():
        return opened.inner_text("#chosen")

    figures = entropy(maps.probabilities), mean_distance(maps.probabilities)

    def caption(layer, head):
        a, b = (figure[layer, head] for figure in figures)
        name = f"Layer {layer + 1}, head {head + 1}"
        return f"{name} · entropy {a:.2f} nats · distance {b:.1f} word pieces"

    assert chosen() == caption(0, 0)
    before = alphas(opened, "#large")
    opened.locator(cell(0, 0)).focus()
    for key, expected in (
        ("ArrowRight", caption(0, 1)),
        ("ArrowDown", caption(1, 1)),
        ("ArrowLeft", caption(1, 0)),
        ("ArrowLeft", caption(1, 0)),
        ("End", "Layer 2, rollout"),
        ("ArrowLeft", "Layer 2, mean"),
        ("ArrowLeft", caption(1, 3)),
    ):
        opened.keyboard.press(key)
        assert chosen() == expected
    assert not np.array_equal(alphas(opened, "#large"), before)
    assert opened.locator("td[aria-selected=true]").count() == 3
    # Each table is a single tab stop.
    assert opened.locator("td[tabindex='0']").count() == 3
    opened.locator(cell(2, 1, "distance")).click()
    assert chosen() == caption(2, 1)
    opened.keyboard.press("ArrowUp")
    assert chosen() == caption(1, 1)


def test_heads_have_distinct_colors_and_can_be_overlaid(opened, maps):
    swatches = opened.locator("#overlay i").evaluate_all("x => x.map(y => y.style.background)")
    assert len(set(swatches)) == maps.probabilities.shape[1] == 4
    for head in (0, 3):
        drawn = pixels(opened, f"{cell(1, head)} canvas").reshape(-1, 4)
        expected = opened.evaluate(f"rgb({head})")
        np.testing.assert_allclose(drawn[drawn[:, 3].argmax(), :3], expected, atol=4)

    alone = []
    for head in (1, 2, 0):
        opened.locator(cell(1, head)).click()
        alone.append(pixels(opened, "#between"))
    box = "input[name=overlay][value='{}']".format
    opened.check(box(1))
    np.testing.assert_array_equal(pixels(opened, "#between"), alone[0])
    opened.check(box(2))
    both = alphas(opened, "#between")
    assert (both >= np.maximum(alone[0][..., 3], alone[1][..., 3]) - 1).all()
    assert (both > alone[0][..., 3]).any()
    opened.click("#overlay button >> nth=0")
    assert all(opened.is_checked(box(head)) for head in range(4))
    opened.click("#overlay button >> nth=1")
    np.testing.assert_array_equal(pixels(opened, "#between"), alone[2])
    marks = opened.locator("#opacity span").evaluate_all(
        "x => x.map(y => [y.textContent, y.style.left])"
    )
    assert marks[-2:] == [["50%", "50%"], ["100%", "100%"]]


def test_special_characters_are_displayed_verbatim(opened, maps):
    assert opened.title() == opened.inner_text("h1") == f"Attention: {TEXT} / {TEXT_B}"
    assert opened.locator("#to li").all_inner_texts() == maps.tokens
    second = opened.locator("#to li.second").all_inner_texts()
    assert second == maps.tokens[7:] == [*"the < script > ' \" & $".split(), "[SEP]"]
    assert opened.locator("h1 *, li script").count() == 0


def test_html_in_tokens_is_escaped(tmp_path, visit):
    odd = ["<b>x</b>", "&amp;", "</script><script>document.title='lost'</script>", "\"'"]
    maps = synthetic(4)._replace(tokens=odd, texts=(odd[2], odd[1]))
    opened = ready(visit(report.write(maps, odd[2], str(tmp_path / "a.html"))[0]))
    assert opened.locator("#to li").all_inner_texts() == odd
    assert opened.title() == f"Attention: {odd[2]} / {odd[1]}"
    assert opened.inner_text("p.quiet >> nth=0").startswith(odd[2])


def test_colors_follow_the_color_scheme(written, visit):
    opened = ready(visit(written[0], color_scheme="light"))

    def colors():
        result = pixels(opened, f"{cell(0, 5)} canvas").reshape(-1, 4)
        return result[result[:, 3].argmax(), :3], opened.evaluate("color('--quiet')")

    light, quiet = colors()
    np.testing.assert_allclose(light, quiet, atol=4)
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_function("getComputedStyle(document.body).colorScheme != ''")
    dark, quiet = colors()
    np.testing.assert_allclose(dark, quiet, atol=4)
    assert np.abs(np.subtract(light, dark)).max() > 50


def synthetic(tokens, layers=1, heads=1, seen=()):
    """Return maps where each token attends to itself, except for the pairs (from, to) in `seen`."""
    weights = np.tile(np.eye(tokens, dtype=np.float32), (layers, heads, 1, 1))
    for i, j in seen:
        weights[..., i, :] = np.eye(tokens, dtype=np.float32)[j]
    pieces = [f"##{i}" for i in range(tokens)]
    return AttentionMaps(("a",), pieces, np.zeros(tokens, np.int32), weights)


def test_thumbnails_of_long_texts_keep_isolated_weights(tmp_path, visit):
    page, _ = report.write(synthetic(300, seen=[(201, 7)]), "m", str(tmp_path / "a.html"))
    opened = ready(visit(page))
    result = alphas(opened, f"{cell(0, 0)} canvas")
    assert result.shape == (70, 70)
    assert result[201 * 70 // 300, 7 * 70 // 300] == 255
    opened.locator("#from li").nth(201).hover()
    assert opened.inner_text("#weights").startswith("##201 (201) attends to ##7 (7) 100%, ")
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_quantization_preserves_small_weights():
    weights = np.full((1, 512, 512), 1 / 512, np.float32)
    kept = (report._bytes(weights) / 255) ** 2
    np.testing.assert_allclose(kept, weights, rtol=0.06)
    any_weight = np.linspace(0, 1, 1000, dtype=np.float32).reshape(1, 1, 1000)
    kept = (report._bytes(np.tile(any_weight, (1, 1000, 1))) / 255) ** 2
    assert np.abs(kept - any_weight).max() < 0.004


# --- The picture ----------------------------------------------------------------------------------


def test_picture_contains_every_map(tmp_path):
    maps = synthetic(9, layers=2, heads=3, seen=[(0, 5)])
    sizes = {}
    for rolled in (False, True):
        out = tmp_path / f"{rolled}.html"
        _, path = report.write(maps, r"no $\formula{$", str(out), rolled)
        sizes[rolled] = matplotlib.image.imread(path).shape
        inches = report.picture(maps, "m", rolled).get_size_inches()
        np.testing.assert_allclose(sizes[rolled][1::-1], 150 * inches, atol=1)
    assert sizes[True][1] - sizes[False][1] == pytest.approx(150 * 1.2, abs=1)
    (axes,) = report.picture(maps, "m", True).axes
    assert len(axes.images) == 2 * (3 + 2)
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("##4") == 2 + 5
    assert {"layer 2", "head 3", "mean", "rollout"} <= set(texts)
    # The top row of the first map holds the attention weights of the first token.
    pixels = matplotlib.image.imread(tmp_path / "True.png")[..., :3].mean(-1)
    left, right, _, high = (150 * x for x in axes.images[0].get_extent())
    top = len(pixels) - high
    cell_side = (right - left) / 9

    def at(row, column):
        return pixels[int(top + (row + 0.5) * cell_side), int(left + (column + 0.5) * cell_side)]

    assert at(0, 5) < 0.4 < 0.9 < at(0, 0)
    assert at(8, 8) < 0.4 < 0.9 < at(8, 5)


def test_illegible_token_labels_are_omitted():
    (axes,) = report.picture(synthetic(100), "m").axes
    assert not [text for text in axes.texts if text.get_text().startswith("##")]


def test_output_paths_and_invalid_out_options(tmp_path):
    def names(out):
        return [path.name for path in report.paths(out)]

    assert names("x/a.html") == ["a.html", "a.png"]
    assert names("a.b.svg") == ["a.b.html", "a.b.svg"]
    for out in ("a", "a.jpg", ".html", ""):
        with pytest.raises(UserError, match=r"must end in \.html, \.png, \.svg or \.pdf"):
            report.paths(out)
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UserError, match="cannot write the picture"):
        report.write(synthetic(3), "m", str(tmp_path / "a.html"))
    _, picture = report.write(synthetic(3), "m", str(tmp_path / "b.svg"))
    assert "<svg" in picture.read_text()


def test_invalid_out_suffix_gives_one_line_error(theirs, tmp_path, capsys):
    command = ["attention", "--init", str(theirs[1]), "--text", "the", "--out"]
    assert cli.main([*command, "a.txt"]) == cli.EXIT_USER_ERROR
    output = capsys.readouterr().err
    assert output == "bert-jax attention: --out a.txt: must end in .html, .png, .svg or .pdf\n"
