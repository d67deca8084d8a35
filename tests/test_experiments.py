"""Experiments: commands parse, settings match the paper, and pages match the recorded results."""

import functools
import gzip
import itertools
import json
import pathlib
import shutil
import sys
import zipfile

import pytest

from bert_jax import cli
from bert_jax.config import flags
from bert_jax.config.schema import FEATURES, Config, FinetuneConfig
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
GOOGLES = "google-bert/bert-base-uncased"
# Experiments that accept an externally pretrained checkpoint.
OF_ANYBODY = (
    "context", "minimal_pairs", "table1_glue", "table2_squad11", "table3_squad20", "table4_swag", "table7_ner",
)  # fmt: skip


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


@pytest.mark.parametrize("name", NAMES)
def test_external_checkpoint_is_fine_tuned_or_rejected(name):
    if name not in OF_ANYBODY:
        with pytest.raises(UserError, match="pretrains its models itself"):
            sweep.load(ROOT / name, SweepArgs("small", DATA, GOOGLES))
        return
    points = load(name, "small", GOOGLES).points
    assert {point.verb for point in points} <= {"finetune", "python"}
    starts = {split(point)[1].init for point in points if point.verb == "finetune"}
    assert starts <= {GOOGLES}


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


@pytest.mark.parametrize("has_wnli", [True, False])
def test_glue_submission_uses_best_seed_of_best_run_per_task(tmp_path, has_wnli):
    def run(name, task, *values):
        """Write seeds 3, 4, …, whose predictions contain the run name and the seed."""
        config = flags.load([f"--config=configs/glue.py:{task}"], FinetuneConfig)
        for seed in range(3, 3 + len(values)):
            folder = tmp_path / name / f"seed_{seed}"
            (folder / "predictions" / "test").mkdir(parents=True)
            best = {"best_by": "x", "highest": True}
            workdir.write_or_check_config(folder, config, [{"digest": ""}], best, False, VOCABULARY)
            file = folder / "predictions" / "test" / {"rte": "RTE.tsv", "cola": "CoLA.tsv"}[task]
            file.write_text(f"index\tprediction\n0\t{name}, {seed}\n")
        value = {"mean": sum(values) / len(values), "values": list(values)}
        seeds = list(range(3, 3 + len(values)))
        result = {"best_by": "accuracy", "seeds": seeds, "dev": {"accuracy": value}}
        (tmp_path / name / "metrics.json").write_text(json.dumps(result))
        return tmp_path / name

    runs = [run("a", "rte", 0.6, 0.9), run("b", "rte", 0.8, 0.71), run("c", "cola", 0.1, 0.3, 0.2)]
    glue = tmp_path / "glue"
    if has_wnli:
        (glue / "WNLI").mkdir(parents=True)
        rows = {"train": ("a\tb\t1", "c\td\t0", "e\tf\t1"), "test": ("g\th", "i\tj")}
        for split, lines in rows.items():
            names = "index\tsentence1\tsentence2" + ("\tlabel" if split == "train" else "")
            text = "\n".join([names, *(f"{i}\t{line}" for i, line in enumerate(lines))]) + "\n"
            with gzip.open(glue / "WNLI" / f"{split}.tsv.gz", "wt") as file:
                file.write(text)
    out = tmp_path / "out"
    command = [sys.executable, "experiments/table1_glue/submit.py", glue, *runs, "--out", out]
    processes.run(command, check=True)
    with zipfile.ZipFile(out / "glue.zip") as archive:
        result = {name: archive.read(name).decode().splitlines()[1:] for name in archive.namelist()}
    expected = {"RTE.tsv": ["0\tb, 3"], "CoLA.tsv": ["0\tc, 4"]}
    if has_wnli:
        expected["WNLI.tsv"] = ["0\t1", "1\t1"]
    assert result == expected
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["rte"] == pytest.approx(0.755)
    assert any("WNLI.tsv" in note for note in metrics["notes"]) == (not has_wnli)


@pytest.mark.parametrize(
    ("name", "epochs", "rate", "batch"),
    [
        ("table2_squad11", 3, 5e-5, 32),
        ("table3_squad20", 2, 5e-5, 48),
        ("table4_swag", 3, 2e-5, 16),
    ],
)
def test_fine_tuning_settings_match_the_paper(name, epochs, rate, batch):
    (config,) = finetuning(name, "paper", GOOGLES).values()
    assert (config.epochs, config.optim.learning_rate, config.batch_size) == (epochs, rate, batch)


def test_ablations_match_the_paper():
    configs = pretraining("table5_ablations", "paper").values()
    kinds = [(config.model.next_sentence, config.model.causal) for config in configs]
    assert kinds == [(True, False), (False, False), (False, True)]
    assert finetuning("table5_ablations", "paper")["+ BiLSTM/SQuAD"].model.lstm_layers == 1


def test_feature_based_settings_match_the_paper():
    configs = finetuning("table7_ner", "paper")
    for name, config in configs.items():
        assert config.task.document_context
        fine_tuned = name.endswith("fine-tuned")
        assert (config.model.features == "") == fine_tuned
        assert config.model.lstm_layers == (0 if fine_tuned else 2)
    assert {config.model.features for config in configs.values()} == {*FEATURES}


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


# --- Pages ----------------------------------------------------------------------------------------


@functools.cache
def module(path: str):
    return sweep.module_of(ROOT / path)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_page_of_a_sweep_regenerates_from_its_results(name, tmp_path):
    folder = tmp_path / name  # pictures are written to it
    shutil.copytree(ROOT / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "recipes.py", tmp_path)
    assert (ROOT / name / "README.md").read_text() == experiment.readme(folder)


def test_other_recorded_pages_regenerate_from_their_results():
    record, run = module("mini/record.py"), module("finetuning/run.py")
    results, trainer = (
        run.read_lines(run.HERE / f"{name}.jsonl") for name in ("results", "trainer")
    )
    make, report = module("results/make.py"), module("reliability/report.py")
    for name, text in {
        **{name: record.page(ROOT / name) for name in ("mini", "base")},
        "finetuning": run.readme(results, trainer),
        "results": make.page(),
    }.items():
        assert (ROOT / name / "README.md").read_text() == text, name
    readme = (ROOT.parent / "README.md").read_text()
    assert readme == make.front(readme)
    table = "\n".join(report.kills(report.read("kills.jsonl")))
    assert f"<!-- kills -->\n{table}\n<!-- /kills -->" in (report.HERE / "README.md").read_text()
