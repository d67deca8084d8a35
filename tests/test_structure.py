"""Package structure: frameworks loaded by imports, and packages of the wheel.

The layers, and the modules that may import a dependency, are contracts in pyproject.toml, which
`make lint` checks.
"""

import importlib.metadata
import pathlib
import pkgutil
import subprocess
import sys
import tomllib

import bert_jax
from bert_jax.runs import workdir

ROOT = pathlib.Path(bert_jax.__file__).parent


def test_wheel_has_all_packages():
    folders = {path.parent.relative_to(ROOT.parent) for path in ROOT.rglob("__init__.py")}
    names = {".".join(folder.parts) for folder in folders} | {
        "bert_jax.configs",
        "bert_jax.tools.launch.scripts",
    }
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    assert set(settings["tool"]["setuptools"]["packages"]) == names


def test_importing_all_modules_loads_no_other_framework():
    names = [info.name for info in pkgutil.walk_packages(bert_jax.__path__, "bert_jax.")]
    # What runs MTEB needs MTEB, which needs PyTorch.
    names = [name for name in names if not name.endswith(("__main__", "mteb_encoder"))]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import pathlib, tempfile, bert_jax.training.log\n"
        "bert_jax.training.log._Board(pathlib.Path(tempfile.mkdtemp()), 0).close()\n"
        "bad = {'tensorflow', 'torch', 'clu', 'transformers', 'tensorflow_datasets'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "[]"


def test_uninstalled_checkout_has_a_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"jax": "1"}.__getitem__)
    expected = {"bert-jax": bert_jax.__version__, "jax": "1"}
    assert workdir.versions(["bert-jax", "jax"]) == expected
