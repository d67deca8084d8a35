"""Package structure: frameworks loaded by imports, packages of the wheel, public docstrings.

The layers, and the modules that may import a dependency, are contracts in pyproject.toml, which
`make lint` checks.
"""

import ast
import pathlib
import subprocess
import sys
import tomllib

import bert_jax

ROOT = pathlib.Path(bert_jax.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read(path: str) -> str:
    return (ROOT / path).read_text()


def settings() -> dict:
    return tomllib.loads((ROOT.parent / "pyproject.toml").read_text())


def test_wheel_has_all_packages():
    folders = {path.parent.relative_to(ROOT.parent) for path in ROOT.rglob("__init__.py")}
    names = {".".join(folder.parts) for folder in folders} | {"bert_jax.configs"}
    assert set(settings()["tool"]["setuptools"]["packages"]) == names


def test_importing_all_modules_loads_no_other_framework():
    names = [".".join(["bert_jax", name_of(path)]) for path in MODULES if path != "__init__.py"]
    names = [name for name in names if not name.endswith("__main__")]
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


def test_public_names_have_docstrings():
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    offenders = []
    for path in MODULES:
        if read(path).strip():
            tree = ast.parse(read(path))
            public = [node for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]
            offenders += [
                (path, getattr(node, "name", "module"))
                for node in (tree, *public)
                if not ast.get_docstring(node)
            ]
    assert not offenders


def test_no_module_is_named_utils():
    assert not [path for path in MODULES if pathlib.Path(path).stem in ("utils", "util", "helpers")]


def test_uninstalled_checkout_has_a_version(monkeypatch):
    import importlib.metadata

    installed = importlib.metadata.version

    def version(name):
        if name == "bert-jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    from bert_jax.runs import workdir

    assert workdir.versions(["bert-jax", "jax"]) == {
        "bert-jax": bert_jax.__version__,
        "jax": installed("jax"),
    }


def test_version_is_defined_once():
    assert "version" in settings()["project"]["dynamic"]
    dynamic = settings()["tool"]["setuptools"]["dynamic"]
    assert dynamic["version"] == {"attr": "bert_jax.__version__"}
