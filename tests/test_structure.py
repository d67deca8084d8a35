"""Package structure: import layers, restricted and forbidden dependencies, public docstrings."""

import ast
import pathlib
import subprocess
import sys
import tomllib

import bert_jax

ROOT = pathlib.Path(bert_jax.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

# A module may import from its own and lower layers, without cycles. A package's entry covers all
# of its modules.
LAYERS = (
    {"errors", "files", "progress"},
    {"storage"},
    {"architectures", "config", "config_checks", "config_flags"},
    {"device", "distributed", "sharding"},
    {"data"},
    {"model", "workdir"},
    {"benchmarks", "checkpoint", "optim"},
    {"convert", "guard", "objectives"},
    {"evaluate", "inference"},
    {"log", "step", "signals", "summary", "tracing", "trackers"},
    {"train"},
    {"api", "tools"},
    {"cli"},
    {"__init__", "__main__"},
)

# Path prefixes of the modules that may import each package.
DOORS = {
    "orbax": ("checkpoint.py",),
    "optax": ("optim.py", "step.py"),
    "tensorflow_datasets": ("data/", "benchmarks/"),
    "apache_beam": ("data/beam.py",),
    "huggingface_hub": ("convert/hub.py", "convert/source.py"),
    "safetensors": ("convert/",),
    "grain": ("data/",),
    "optuna": ("tools/sweep/",),
    "matplotlib": ("benchmarks/", "tools/report/"),
    "tensorboardX": ("log.py",),
    "fsspec": ("storage/",),
    "gcsfs": ("storage/",),
    "s3fs": ("storage/",),
    "etils": ("checkpoint.py",),
    "wandb": ("trackers.py",),
    "mlflow": ("trackers.py",),
}
FORBIDDEN = {"tensorflow", "torch", "clu", "transformers"}


def layer(module: str) -> int:
    """Return the layer of a module, given its dotted name below bert_jax."""
    (result,) = (i for i, names in enumerate(LAYERS) if module.split(".")[0] in names)
    return result


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, module_level: bool = False) -> set[str]:
    """Return the imported dotted names; `from a import b` gives both `a` and `a.b`."""
    tree, result = ast.parse(source), set()
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
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            result.add(node.module)
            result.update(f"{node.module}.{alias.name}" for alias in node.names)
    return result


def own_imports(source: str) -> set[str]:
    """Return the imported modules of bert_jax, by their dotted names below it."""
    names = {name.removeprefix("bert_jax.") for name in imports(source) if "bert_jax." in name}
    modules = {name_of(path) for path in MODULES}
    result = names & modules
    # `from package import module` also gives `package`, which counts only without its modules.
    return {name for name in result if not any(other.startswith(f"{name}.") for other in result)}


def packages(source: str, module_level: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(source, module_level)}


def read(path: str) -> str:
    return (ROOT / path).read_text()


def test_layers_list_every_module():
    listed = [name for names in LAYERS for name in names]
    assert sorted(listed) == sorted({name_of(path).split(".")[0] for path in MODULES})


def test_imports_point_downwards():
    offenders = [
        f"{path} imports {name}"
        for path in MODULES
        for name in sorted(own_imports(read(path)))
        if layer(name) > layer(name_of(path))
    ]
    assert not offenders


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that are in or lead to an import cycle; [] if there is none."""
    graph = {name: set(targets) for name, targets in graph.items()}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    return sorted(graph)


def test_imports_have_no_cycles():
    graph = {name_of(path): own_imports(read(path)) for path in MODULES if "cli" not in path}
    assert not cycle(graph)
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [*"abcd"]


def test_dependencies_are_imported_only_where_allowed():
    offenders = []
    for path in MODULES:
        used = packages(read(path))
        offenders += [(path, name) for name in used & FORBIDDEN]
        offenders += [
            (path, name) for name in used & DOORS.keys() if not path.startswith(DOORS[name])
        ]
        if "tensorflow_datasets" in packages(read(path), module_level=True):
            offenders.append((path, "tensorflow_datasets"))
        if path != "sharding.py" and "jax.sharding.Mesh(" in read(path).replace(
            " Mesh(", " jax.sharding.Mesh("
        ):
            offenders.append((path, "jax.sharding.Mesh"))
    assert not offenders


def test_import_parser_and_layer_order():
    source = (
        "import torch.nn\ndef f():\n    from bert_jax.train import x\n    import orbax.checkpoint\n"
    )
    assert packages(source) == {"torch", "bert_jax", "orbax"}
    assert packages(source, module_level=True) == {"torch"}
    assert layer("data.rows") < layer("objectives.pretraining") < layer("train") < layer("cli")
    assert layer("errors") < layer("config")
    assert own_imports(source) == {"train"}
    assert own_imports("from bert_jax.tools import sweep") == {"tools.sweep"}


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
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "bert_jax.__version__"}
