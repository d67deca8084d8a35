"""Experiments: commands parse, settings match the paper, and pages match the recorded results."""

import concurrent.futures
import functools
import gzip
import itertools
import json
import pathlib
import re
import shutil
import sys
import zipfile

import matplotlib
import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config import flags
from bert_jax.config import schema as config_lib
from bert_jax.config.schema import Config, FinetuneConfig
from bert_jax.data import vocabulary as vocabularies
from bert_jax.errors import UserError
from bert_jax.runs import workdir
from bert_jax.tools import sweep
from bert_jax.tools.sweep import SCALES, SweepArgs, experiment
from tests.helpers import processes
from tests.helpers.runs import VOCABULARY

ROOT = pathlib.Path(__file__).parent.parent / "experiments"
NAMES = sorted(path.parent.name for path in ROOT.glob("*/sweep.py"))
AT_SCALES = sorted({*itertools.product(NAMES, SCALES)} - {("packing", "paper")})
DATA = pathlib.Path("/nowhere/data")
# Experiments that accept an externally pretrained checkpoint.
OF_ANYBODY = (
    "context", "minimal_pairs", "table1_glue", "table2_squad11", "table3_squad20", "table4_swag", "table7_ner",
)  # fmt: skip
NOT_RUN = "not run"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Run in the repository root: commands refer to configs/ by relative path."""
    monkeypatch.chdir(ROOT.parent)


@functools.cache
def load(name: str, scale: str, init: str = "") -> sweep.Sweep:
    return sweep.load(ROOT / name, SweepArgs(scale, DATA, init))


@functools.cache
def read_config(arguments: tuple[str, ...], kind: type):
    return flags.load(list(arguments), kind)


@functools.cache
def parser():
    return cli.parser()


def split(point: sweep.Point):
    """Return the config flags of a point and its parsed command-line options."""
    folder = "--workdir" if point.verb in ("pretrain", "finetune") else "--out"
    config, rest = flags.split([*point.display_command(DATA), folder, "x"])
    return tuple(config), parser().parse_args(rest)


def config_of(point: sweep.Point):
    """Return the config that the settings of a point produce."""
    kinds = {"pretrain": Config, "finetune": FinetuneConfig}
    return read_config(split(point)[0], kinds[point.verb])


def pretraining(name: str, scale: str) -> dict[str, Config]:
    """Return the pretraining configs by point name."""
    points = load(name, scale).points
    return {point.name: config_of(point) for point in points if point.verb == "pretrain"}


def finetuning(name: str, scale: str, init: str = "") -> dict[str, FinetuneConfig]:
    """Return the fine-tuning configs by point name."""
    points = load(name, scale, init).points
    return {point.name: config_of(point) for point in points if point.verb == "finetune"}


def shape(config: Config) -> tuple[int, int, int]:
    return config.model.layers, config.model.hidden, config.model.heads


# --- Points ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "scale"), AT_SCALES)
def test_every_command_parses_without_the_data(name, scale):
    points = load(name, scale).points
    assert len({point.name for point in points}) == len(points)
    read_ = set()
    for point in points:
        if point.verb == "python":
            assert (ROOT.parent / point.command[1]).is_file()
            continue
        settings, _ = split(point)
        kind = (point.verb, settings[:1], *(each.partition("=")[0] for each in settings))
        if point.verb == "pretrain" or (point.verb == "finetune" and kind not in read_):
            config_of(point)
        read_.add(kind)  # one config per grid is enough
        if point.verb == "pretrain":
            rows = [split(needed)[1].tokens for needed in point.needs]
            assert rows == [phase.tokens for phase in config_of(point).phases]


def test_point_digests_are_unique():
    """Points with the same command would share a result line per seed, with the facts of one."""
    for name, scale in AT_SCALES:
        digests = [point.digest(DATA) for point in load(name, scale).points]
        assert len({*digests}) == len(digests), name


@pytest.mark.parametrize(("name", "scale"), AT_SCALES)
def test_external_checkpoint_is_fine_tuned_or_rejected(name, scale):
    if name not in OF_ANYBODY:
        with pytest.raises(UserError, match="pretrains its models itself"):
            sweep.load(ROOT / name, SweepArgs(scale, DATA, "google-bert/bert-base-uncased"))
        return
    points = load(name, scale, "google-bert/bert-base-uncased").points
    assert {point.verb for point in points} <= {"finetune", "python"}
    starts = {split(point)[1].init for point in points if point.verb == "finetune"}
    assert starts <= {"google-bert/bert-base-uncased"}


def test_experiments_share_common_pretraining_runs():
    def digest(name, point, scale):
        return next(p for p in load(name, scale).points if p.name == point).digest(DATA)

    for scale in SCALES:
        shared = {digest(name, "base", scale) for name in ("table2_squad11", "table5_ablations")}
        shared.add(digest("figure5_steps", "base", scale))
        assert len(shared) == 1
        causal = {
            digest(name, "left-to-right, no NSP", scale)
            for name in ("table5_ablations", "figure5_steps")
        }
        assert len(causal) == 1
    # At small scale these two experiments pretrain their own, shorter runs.
    assert digest("table6_model_size", "L12-H768-A12", "paper") in shared
    assert digest("table8_masking", "80/10/10", "paper") in shared


# --- The paper's recipe ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*NAMES} - {"miniberta", "packing", "plateau"}))
def test_pretraining_settings_match_the_paper(name):
    for config in pretraining(name, "paper").values():
        assert (config.steps, config.batch_size) == (1_000_000, 256)
        assert [(p.tokens, p.fraction, p.batch_size) for p in config.phases] == [
            (128, 0.9, 0),
            (512, 0.1, 0),
        ]
        optim = config.optim
        assert (optim.optimizer, optim.learning_rate, optim.warmup_steps) == ("adam", 1e-4, 10_000)
        assert (config.model.dropout, config.masking.rate) == (0.1, 0.15)
    for point in load(name, "paper").points:
        if point.verb == "prepare":
            options = split(point)[1]
            assert (options.sequences, options.short_fraction, options.pairs) == (1, None, "nsp")


def test_model_and_vocabulary_sizes_match_the_paper():
    assert {shape(config) for config in pretraining("table1_glue", "paper").values()} == {
        (12, 768, 12),
        (24, 1024, 16),
    }
    assert [shape(config) for config in pretraining("table6_model_size", "paper").values()] == [
        (3, 768, 12),
        (6, 768, 3),
        (6, 768, 12),
        (12, 768, 12),
        (12, 1024, 16),
        (24, 1024, 16),
    ]
    vocabularies = {
        name: split(next(p for p in load(name, "paper").points if p.verb == "vocab"))[1]
        for name in ("table1_glue", "table7_ner")
    }
    assert vocabularies["table1_glue"].size == 30_522
    assert (vocabularies["table7_ner"].size, vocabularies["table7_ner"].cased) == (28_996, True)


def test_glue_covers_the_full_hyperparameter_grid():
    tried: dict[tuple[str, str], set] = {}
    for point in load("table1_glue", "paper").points:
        if point.verb == "finetune":
            settings = dict(each.removeprefix("--config").split("=") for each in split(point)[0])
            names = (".batch_size", ".optim.learning_rate", ".epochs")
            own = tried.setdefault((point.facts["model"], settings[""].partition(":")[2]), set())
            own.add(tuple(float(settings[name]) for name in names))
    names = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
    assert tried.keys() == {*itertools.product(("base", "large"), names)}
    grid = {*itertools.product((16, 32), (5e-5, 4e-5, 3e-5, 2e-5), (2, 3, 4))}
    assert all(own == grid for own in tried.values())
    submissions = [p for p in load("table1_glue", "paper").points if p.verb == "python"]
    assert [len(point.needs) for point in submissions] == [192, 192]


@pytest.mark.parametrize("wnli", ["", ".gz", None])
def test_glue_submission_uses_best_seed_of_best_run_per_task(tmp_path, wnli):
    def run(name, task, *values):
        """Write seeds 3, 4, …, whose predictions contain the run name and the seed."""
        config = flags.load([f"--config=configs/glue.py:{task}"], FinetuneConfig)
        for seed in range(3, 3 + len(values)):
            folder = tmp_path / name / f"seed_{seed}"
            (folder / "predictions" / "test").mkdir(parents=True)
            workdir.write_or_check_config(
                folder,
                config,
                [{"digest": ""}],
                {"best_by": "x", "highest": True},
                False,
                VOCABULARY,
            )
            file = folder / "predictions" / "test" / {"rte": "RTE.tsv", "cola": "CoLA.tsv"}[task]
            file.write_text(f"index\tprediction\n0\t{name}, {seed}\n")
        value = {"mean": sum(values) / len(values), "values": list(values)}
        seeds = list(range(3, 3 + len(values)))
        result = {"best_by": "accuracy", "seeds": seeds, "dev": {"accuracy": value}}
        (tmp_path / name / "metrics.json").write_text(json.dumps(result))
        return tmp_path / name

    runs = [run("a", "rte", 0.6, 0.9), run("b", "rte", 0.8, 0.71), run("c", "cola", 0.1, 0.3, 0.2)]
    glue = tmp_path / "glue"
    if wnli is not None:
        (glue / "WNLI").mkdir(parents=True)
        rows = {"train": ("a\tb\t1", "c\td\t0", "e\tf\t1"), "test": ("g\th", "i\tj")}
        for split, lines in rows.items():
            names = "index\tsentence1\tsentence2" + ("\tlabel" if split == "train" else "")
            text = "\n".join([names, *(f"{i}\t{line}" for i, line in enumerate(lines))]) + "\n"
            opened = gzip.open if wnli else open
            with opened(glue / "WNLI" / f"{split}.tsv{wnli}", "wt") as file:
                file.write(text)
    out = tmp_path / "out"
    command = [sys.executable, "experiments/table1_glue/submit.py", glue, *runs, "--out", out]
    processes.run(command, check=True)
    with zipfile.ZipFile(out / "glue.zip") as archive:
        result = {name: archive.read(name).decode().splitlines()[1:] for name in archive.namelist()}
    expected = {"RTE.tsv": ["0\tb, 3"], "CoLA.tsv": ["0\tc, 4"]}
    if wnli is not None:
        expected["WNLI.tsv"] = ["0\t1", "1\t1"]
    assert result == expected
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["rte"] == pytest.approx(0.755)
    missing = "WNLI.tsv is missing: the server requires all files"
    assert (missing in metrics["notes"]) == (wnli is None)


@pytest.mark.parametrize(
    ("name", "epochs", "rate", "batch"),
    [
        ("table2_squad11", 3, 5e-5, 32),
        ("table3_squad20", 2, 5e-5, 48),
        ("table4_swag", 3, 2e-5, 16),
    ],
)
def test_fine_tuning_settings_match_the_paper(name, epochs, rate, batch):
    (config,) = finetuning(name, "paper", "google-bert/bert-base-uncased").values()
    assert (config.epochs, config.optim.learning_rate, config.batch_size) == (epochs, rate, batch)


def test_ablations_match_the_paper():
    full, without, causal = pretraining("table5_ablations", "paper").values()
    assert full.model.next_sentence
    assert not full.model.causal
    assert not without.model.next_sentence
    assert not without.model.causal
    assert causal.model.causal
    assert not causal.model.next_sentence
    assert finetuning("table5_ablations", "paper")["+ BiLSTM/SQuAD"].model.lstm_layers == 1


@pytest.mark.parametrize("name", ["table5_ablations", "table6_model_size", "table8_masking"])
def test_small_models_use_three_pretraining_seeds(name):
    seeds = {}
    for point, config in pretraining(name, "small").items():
        seeds.setdefault(point.partition(", seed ")[0], []).append(config.seed)
        assert [phase.tokens for phase in config.phases] == [8, 16, 32, 64, 128]
        assert [p.batch_size * p.tokens for p in config.phases[:-1]] == [1_024] * 4
    assert all(own == [0, 1, 2] for own in seeds.values())
    for point in load(name, "small").points:
        if point.verb == "finetune":
            start = point.command[point.command.index("--init") + 1]
            assert config_of(point).seed == config_of(start).seed


def test_feature_based_settings_match_the_paper():
    for name, config in finetuning("table7_ner", "paper").items():
        assert config.task.document_context
        fine_tuned = name.endswith("fine-tuned")
        assert (config.model.features == "") == fine_tuned
        assert config.model.lstm_layers == (0 if fine_tuned else 2)
    kinds = {config.model.features for config in finetuning("table7_ner", "paper").values()}
    assert kinds == {*config_lib.FEATURES}
    assert {c.model.features for c in finetuning("table8_masking", "paper").values()} == {
        "",
        "last4",
    }


def test_masking_mixes_match_the_paper():
    for scale in SCALES:
        mixes = {
            name.partition(", seed ")[0]: (
                c.masking.mask_fraction,
                c.masking.same_fraction,
                c.masking.random_fraction,
            )
            for name, c in pretraining("table8_masking", scale).items()
        }
        assert mixes == {
            "80/10/10": (0.8, 0.1, 0.1),
            "100/0/0": (1, 0, 0),
            "80/0/20": (0.8, 0, 0.2),
            "80/20/0": (0.8, 0.2, 0),
            "0/20/80": (0, 0.2, 0.8),
            "0/0/100": (0, 0, 1),
        }


@pytest.mark.parametrize("scale", SCALES)
def test_intermediate_checkpoints_are_kept(scale):
    kept = pretraining("figure5_steps", scale).values()
    for point in load("figure5_steps", scale).points:
        if point.verb == "finetune":
            step = int(split(point)[1].checkpoint)
            for config in kept:
                every, last = config.checkpoint.every_steps, config.checkpoint.keep_last
                assert step % every == 0
                assert step > config.steps - every * last


def test_small_sizes_have_equal_tokens_and_vary_depth_and_width():
    configs = pretraining("table6_model_size", "small").values()
    assert len(configs) >= 8
    assert len({(c.steps, c.batch_size, c.phases[0].tokens) for c in configs}) == 1
    shapes = {shape(config) for config in configs}
    assert max(len({d for d, w, _ in shapes if w == width}) for _, width, _ in shapes) >= 3
    assert max(len({w for d, w, _ in shapes if d == depth}) for depth, _, _ in shapes) >= 3


# --- Derived datasets and results -----------------------------------------------------------------


@pytest.fixture(scope="module")
def recipes():
    sweep.module_of(ROOT / NAMES[0] / "sweep.py")
    import recipes

    return recipes


def test_unanswerable_questions_use_a_neighboring_paragraph(recipes):
    def paragraph(text, *answers):
        questions = [{"id": a, "question": a, "answers": [{"text": a}]} for a in answers]
        return {"context": text, "qas": questions}

    article = [paragraph("one two three", "one", "two", "three"), paragraph("one four", "four")]
    own, other = recipes._unanswerable(article, 0, iter([1, 3, 2]))
    assert [q["id"] for q in own["qas"]] == ["one", "three"]
    assert other["context"] == "one four"
    assert [(q["id"], q["answers"], q["is_impossible"]) for q in other["qas"]] == [
        ("two", [], True)
    ]
    # A question is not moved if the neighboring paragraph contains its answer.
    (own,) = recipes._unanswerable(article, 0, iter([3, 1, 2]))
    assert [q["id"] for q in own["qas"]] == ["one", "two", "three"]


def test_picked_keeps_the_best_setting_of_each_grid(recipes):
    def line(model, setting, value):
        facts = {"model": model, "task": "RTE", "setting": setting}
        return {"scale": "small", "facts": facts, "metrics": {"dev.accuracy": value}}

    lines = [line("a", "x", 0.9), line("a", "x", 0.5), line("a", "y", 0.8), line("b", "x", 0.1)]
    other = {"scale": "small", "facts": {"model": "a"}, "metrics": {}}
    assert recipes.picked([*lines, other]) == [lines[2], lines[3], other]


# --- Pages ----------------------------------------------------------------------------------------


def copy(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Copy an experiment to a folder that the test may write to."""
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "recipes.py", folder)
    return folder / name


@pytest.mark.parametrize("name", NAMES)
def test_readmes_match_their_results(name, tmp_path):
    folder = copy(tmp_path, name)
    text = experiment.readme(folder)
    assert (ROOT / name / "README.md").read_text() == text
    for picture in re.findall(r"!\[.*\]\((\w+\.svg)\)", text):
        recorded = (ROOT / name / picture).read_text()
        if f"Matplotlib v{matplotlib.__version__}," in recorded:  # versions draw differently
            assert recorded == (folder / picture).read_text()


def test_miniberta_settings_match_the_published_model():
    config = pretraining("miniberta", "paper")["base"]
    (phase,) = config.phases
    assert (config.steps, config.batch_size, phase.tokens) == (10_000, 512, 512)
    assert (config.optim.learning_rate, config.optim.warmup_steps) == (5e-4, 600)
    assert (config.masking.rate, config.model.next_sentence) == (0.15, False)


def test_miniberta_subset_is_ten_million_words_of_known_files(shared_data, tmp_path):
    subset = sweep.module_of(ROOT / "miniberta" / "subset.py")
    words, size = (sum(line[i] for line in subset.read()) for i in (1, 2))
    assert 9.9e6 < words <= 10e6
    assert 5 * words < size < 7 * words
    assert len(subset.sources(DATA)) == len(subset.read()) == 60
    with pytest.raises(UserError, match=r"is not the file of files\.tsv: put it there, or select"):
        subset.check(tmp_path)
    subset.check(shared_data("text").parent)


def test_losses_per_word_count_the_whole_text(rows, tmp_path):
    """Rows of T=8 leave out the end of a long sentence, which belongs to the text all the same."""
    module = sweep.module_of(ROOT / "miniberta" / "measure.py")
    text = "The lamp is old, and the river is cold and deep and wide and dark."
    (tmp_path / "text.txt").write_text(f"{text}\n\n{text}\n")
    folder = rows()
    pieces = 2 * len(vocabularies.load(folder).tokenizer().encode(text).ids)
    units = module.units(2.0, [str(tmp_path / "text.txt")], folder)
    assert (units["pieces"], units["words"], units["bytes"]) == (pieces, 30, 2 * len(text))
    assert units["per_word"] == pytest.approx(2.0 * pieces / 30)
    assert units["per_byte"] == pytest.approx(2.0 * pieces / (2 * len(text)))


def test_results_page_and_main_readme_match_the_results():
    make = sweep.module_of(ROOT / "results" / "make.py")
    assert (ROOT / "results" / "README.md").read_text() == make.page()
    readme = (ROOT.parent / "README.md").read_text()
    assert readme == make.front(readme)
    shown = readme.partition("<!-- results -->")[2].partition("<!-- /results -->")[0]
    assert len(shown.strip().splitlines()) == len(make.HEAD) + make.FRONT
    assert {path.parent.name for path in ROOT.glob("*/sweep.py")} - {"context", "packing"} <= {
        name for name in re.findall(r"\.\./(\w+)/README", make.page())
    }


def made_up(name: str, scale: str) -> list[dict]:
    """Return synthetic results for all points of a sweep."""
    measures = {
        "pretrain": ("masked_lm_loss", "masked_lm_perplexity", "next_sentence_accuracy"),
        "finetune": tuple(
            f"{split}.{metric}"
            for split in ("dev", "dev_mismatched", "test")
            for metric in (
                "accuracy", "accuracy_f1", "exact", "f1", "HasAns_f1", "matthews", "NoAns_f1",
                "pearson_spearman", "spearman",
            )
        ),
    }  # fmt: skip
    lines = []
    for i, point in enumerate(load(name, scale).points):
        line = {"point": point.name, "scale": scale, "facts": point.facts, "metrics": {}}
        command = " ".join(["bert-jax", *point.display_command(DATA)])
        line |= {"command": command, "digest": point.digest(DATA), "wall_seconds": 9}
        if point.verb in measures:
            line |= {
                "seed": 0,
                "step": 9,
                "real_tokens": 9,
                "step_seconds": 9,
                "flops": 9,
                "load": 1,
                "cores": 1,
            }
            line |= {"devices": "1 cpu", "commit": "", "metrics": dict.fromkeys(measures[point.verb], i / 1e3)}  # fmt: skip
        if point.verb == "pretrain":
            line["curve"] = {"step": [1], "real_tokens": [1], "seconds": [1], "loss": [i]}
        if point.name == "senses":
            line["metrics"] = senses()
        if point.name.endswith("/pairs"):
            line["metrics"] = {"blimp": i / 1e3, "zorro": i / 1e3}
        if point.name.endswith("/losses"):
            keys = ("per_piece", "per_word", "per_byte", "pieces_per_word")
            line["metrics"] = dict.fromkeys(keys, i / 1e3)
        lines.append(line)
    return lines


def senses() -> dict:
    """Measure random vectors as senses.py does: the senses separate only in layer 2 of 2."""
    module = sweep.module_of(ROOT / "context" / "senses.py")
    draw, result = np.random.default_rng(0), {}
    for word, sentences in module.read().items():
        own = [sense for sense, _ in sentences]
        vectors = draw.normal(size=(len(own), 2, 8))
        vectors[:, 1, 0] += 20.0 * (np.array(own) == own[0])
        vectors[:, 1, 1] += 20.0 * (np.array(own) != own[0])
        result[word] = module.measure(vectors, own)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_every_table_cell_has_a_point(name, tmp_path):
    folder = copy(tmp_path, name)
    lines = [line for of, scale in AT_SCALES if of == name for line in made_up(name, scale)]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = experiment.readme(folder)
    assert NOT_RUN not in text, re.findall(rf".*{NOT_RUN}.*", text)


def test_altered_number_in_readme_is_detected(tmp_path):
    folder = copy(tmp_path, "table6_model_size")
    (folder / "results.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in made_up("table6_model_size", "small"))
    )
    experiment.write_readme(folder)
    text = (folder / "README.md").read_text()
    assert experiment.readme(folder) == text
    block = text.index("| L4-H128-A2 |")
    digit = re.search(r"\d\.\d", text[block:]).start() + block
    changed = f"{text[:digit]}{(int(text[digit]) + 1) % 10}{text[digit + 1 :]}"
    (folder / "README.md").write_text(changed)
    assert experiment.readme(folder) == text != changed


def test_separated_word_senses_are_detected():
    for result in senses().values():
        assert result["neighbor"][1] == 1 > result["neighbor"][0]
        assert result["silhouette"][1] > 0.5 > abs(result["silhouette"][0])
        assert 0.4 < result["chance"] < result["chance_high"] < 0.75


def test_sentences_contain_their_word_once():
    read_ = sweep.module_of(ROOT / "context" / "senses.py").read()
    counts: dict[tuple[str, str], int] = {}
    for word, sentences in read_.items():
        for sense, sentence in sentences:
            assert len(re.findall(rf"\b{word}\b", sentence)) == 1, sentence
            counts[word, sense] = counts.get((word, sense), 0) + 1
    assert len(read_) >= 2
    assert min(counts.values()) >= 20


SCALE = """
import pathlib, sys
sys.path.insert(0, "experiments/scale")
import report
for name in ("recipe_table", "lamb_table", "misses"):
    setattr(report, name, lambda *given: [])
phase = {
    "memory": {"total": 2**30, "temporaries": 2**20}, "would_fit": None, "collectives": {},
    "flops": {"formula": 1.0, "compiled": 1.0, "cost_analysis": 1.0}, "traffic": 1.0,
    "compile_seconds": 1.0,
}
compiled = {"report": {"phases": [phase], "fits": True}, "jax": "0", "libtpu": "0"}
place = {"run": "recipe", "size": "base", "tokens": 128, "topology": "v5e:2x2", "change": ""}
loops = {"run": "loops", "size": "small", "layer_loop": "scanned", "remat": "none"}
refused = {**place, "topology": "v6e:2x2", "refused": "libtpu does not"}
results = [{**place, **compiled}, {**place, **compiled}, {**loops, **compiled}, refused]
report.write(results, pathlib.Path(sys.argv[1]))
"""


def test_scale_page_distinguishes_kinds_of_results(tmp_path):
    page = tmp_path / "README.md"
    processes.run([sys.executable, "-c", SCALE, page], cwd=ROOT.parent, check=True)
    text = page.read_text()
    assert "1 programs compiled so far" in text
    assert "Not compiled: recipe base T=128 v6e:2x2 : libtpu does not." in text
    assert "| scanned | none |" in text


# --- Pages without a sweep ------------------------------------------------------------------------


@functools.cache
def module(path: str):
    return sweep.module_of(ROOT / path)


def test_finetuning_page_matches_its_results():
    run = module("finetuning/run.py")
    results, trainer = (
        run.read_lines(run.HERE / f"{name}.jsonl") for name in ("results", "trainer")
    )
    assert (run.HERE / "README.md").read_text() == run.readme(results, trainer)


@pytest.mark.parametrize("name", ["mini", "base"])
def test_pages_of_single_runs_match_their_results(name):
    record = module("mini/record.py")
    assert (ROOT / name / "README.md").read_text() == record.page(ROOT / name)


def test_kills_of_the_reliability_page_match_their_results():
    report = module("reliability/report.py")
    table = "\n".join(report.kills(report.read("kills.jsonl")))
    assert f"<!-- kills -->\n{table}\n<!-- /kills -->" in (report.HERE / "README.md").read_text()


def test_concurrent_runs_lose_no_line_of_results(tmp_path):
    keep, path = module("finetuning/run.py").keep_line, tmp_path / "results.jsonl"
    lines = [{"set": i % 40, "start": "none", "value": i // 40} for i in range(80)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for half in (lines[:40], lines[40:]):  # the second replaces the first
            list(pool.map(lambda line: keep(path, line, "set", "start"), half))
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(kept, key=lambda line: line["set"]) == lines[40:]
