"""experiments/tour.ipynb runs from top to bottom, and is committed as it came out."""

import pathlib

import nbclient
import nbformat
import pytest

from bert_jax import cli

NOTEBOOK = pathlib.Path(__file__).parent.parent / "experiments" / "tour.ipynb"


@pytest.fixture
def tour():
    return nbformat.read(NOTEBOOK, as_version=4)


def said(cell) -> str:
    """What a cell wrote."""
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


@pytest.mark.slow
def test_it_runs(tour, rows, tmp_path, monkeypatch):
    folder = rows(32, 3)
    model = tmp_path / "model"
    argv = (
        "--config=configs/pretrain.py:L2-H16-A2,32 --config.steps=4 --config.batch_size=8 "
        f"--config.evaluate_every_steps=4 --rows {folder} --workdir {model}"
    )
    monkeypatch.chdir(NOTEBOOK.parent.parent)
    assert cli.main(["pretrain", *argv.split()]) == 0
    monkeypatch.setenv("BERT_JAX_TOUR_MODEL", str(model))
    monkeypatch.setenv("BERT_JAX_TOUR_ROWS", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    client = nbclient.NotebookClient(
        tour, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    told = "\n".join(said(cell) for cell in tour.cells if cell.cell_type == "code")
    assert "step 4: 2 layers of 16, 2 heads, 150 word pieces" in told
    assert "encoder/layer_0/attention/query {'bias': (2, 8), 'kernel': (16, 2, 8)}" in told
    assert "did you mean config.model.layers?" in told
    assert "step 50: held-out mlm" in told
    pictures = [o for cell in tour.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", ())]  # fmt: skip
    assert len(pictures) == 3


def test_it_is_committed_as_it_came_out(tour):
    cells = [cell for cell in tour.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert "step 50: held-out mlm" in said(cells[-1])
    assert not any(place in NOTEBOOK.read_text() for place in ("/root", "/home", "/tmp", "/work"))
