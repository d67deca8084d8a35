"""Who may import whom, what nobody may import, and that what is public says what it is."""

import ast
import functools
import pathlib
import subprocess
import sys
import tomllib

import bert_jax

ROOT = pathlib.Path(bert_jax.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

# Lower may not import higher. A module in none of these stands where the highest it imports does.
LAYERS = (
    {"errors", "files", "progress"},
    {"config"},
    {"model", "attention", "dropout", "losses", "masking", "optim", "sharding", "data"},
    {"checkpoint", "convert", "tasks"},
    {"train", "evaluate", "inference", "preflight"},
    {"sweep", "report"},
    {"cli"},
)


@functools.cache
def layer(module: str) -> int:
    """Of a dotted name below bert_jax."""
    top = module.split(".")[0]
    for i, names in enumerate(LAYERS):
        if top in names:
            return i
    path = ROOT / f"{top}.py"
    return max(map(layer, own_imports(path.read_text())), default=0) if path.exists() else 0


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, module_level: bool = False) -> set[str]:
    """Dotted names imported; of `from a import b` both `a` and `a.b`."""
    tree, found = ast.parse(source), set()
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if module_level and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def own_imports(source: str) -> set[str]:
    """The modules of bert_jax imported, by the first part of their name below it."""
    parts = {name.split(".")[1] for name in imports(source) if name.startswith("bert_jax.")}
    return {part for part in parts if (ROOT / part).is_dir() or (ROOT / f"{part}.py").exists()}


def packages(source: str, module_level: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(source, module_level)}


def read(path: str) -> str:
    return (ROOT / path).read_text()


def test_imports_point_downwards():
    offenders = [
        f"{path} imports {name}"
        for path in MODULES
        for name in sorted(own_imports(read(path)))
        if layer(name) > layer(name_of(path))
    ]
    assert not offenders


def test_one_door_a_dependency():
    offenders = []
    for path in MODULES:
        used = packages(read(path))
        offenders += [
            (path, name) for name in used & {"tensorflow", "torch", "clu", "transformers"}
        ]
        if "orbax" in used and path != "checkpoint.py":
            offenders.append((path, "orbax"))
        if "tensorflow_datasets" in used and (
            not path.startswith(("data/", "tasks/"))
            or "tensorflow_datasets" in packages(read(path), module_level=True)
        ):
            offenders.append((path, "tensorflow_datasets"))
    assert not offenders


def test_the_checks_can_fail():
    source = (
        "import torch.nn\ndef f():\n    from bert_jax.train import x\n    import orbax.checkpoint\n"
    )
    assert packages(source) == {"torch", "bert_jax", "orbax"}
    assert packages(source, module_level=True) == {"torch"}
    assert layer("data.rows") < layer("tasks.pretraining") < layer("train") < layer("cli")
    assert layer("errors") < layer("config")
    assert own_imports(source) == ({"train"} if (ROOT / "train.py").exists() else set())


def test_importing_everything_imports_no_other_framework():
    names = [".".join(["bert_jax", name_of(path)]) for path in MODULES if path != "__init__.py"]
    names = [name for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import pathlib, tempfile, bert_jax.log\n"
        "bert_jax.log._board(pathlib.Path(tempfile.mkdtemp()), 0).close()\n"
        "bad = {'tensorflow', 'torch', 'clu', 'transformers', 'tensorflow_datasets'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "[]"


def test_what_is_public_has_a_docstring():
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


def test_no_module_is_called_utils():
    assert not [path for path in MODULES if pathlib.Path(path).stem in ("utils", "util", "helpers")]


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch):
    import importlib.metadata

    installed = importlib.metadata.version

    def version(name):
        if name == "bert-jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    from bert_jax import workdir

    assert workdir.versions(["bert-jax", "jax"]) == {
        "bert-jax": bert_jax.__version__,
        "jax": installed("jax"),
    }


def test_the_version_is_written_once():
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "bert_jax.__version__"}
