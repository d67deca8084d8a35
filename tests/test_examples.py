"""The notebooks in examples/ run from top to bottom and are committed with their output."""

import pathlib

import nbclient
import nbformat
import pytest

from bert_jax import cli

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
IMAGES = {"tour": 2, "continue_pretraining": 0, "fine_tune_a_table": 0, "probe_attention": 2}


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def model(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "model"
    argv = (
        "--config=L2-H16-A2,32 --config.steps=4 --config.batch_size=8 "
        f"--config.evaluate_every_steps=4 --rows {rows(32, 3)} --workdir {folder}"
    )
    assert cli.main(["pretrain", *argv.split()]) == 0
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.ipynb")))
def test_notebook_runs(name, model, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_EXAMPLE_MODEL", str(model))
    monkeypatch.setenv("BERT_JAX_EXAMPLE_ROWS", str(rows(32, 3)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = read(name)
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == IMAGES[name]
