"""The notebooks in examples/ run from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

from bert_jax import cli

FOLDER = pathlib.Path(__file__).parent.parent / "examples"


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
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, model, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_EXAMPLE_MODEL", str(model))
    monkeypatch.setenv("BERT_JAX_EXAMPLE_ROWS", str(rows(32, 3)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    resources = {"metadata": {"path": str(FOLDER)}}
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
