"""Shared test setup: runtime shape checks, JAX on eight virtual CPU devices, a small corpus."""

import functools
import gc
import os
import shutil
import tempfile
from importlib import metadata

# Set before anything imports JAX. Eight devices let one process test every mesh. Tests of tiny models spend most of
# their time compiling, hence the low optimization level, and older emitters where XLA still has them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * metadata.version("jaxlib").startswith("0.10.")
)
# pytest runs one worker per core. More PyTorch threads per worker would oversubscribe the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Where there are no credentials, the library of gs:// would ask the network for them for 15 seconds.
os.environ["NO_GCE_CHECK"] = "true"
# Tests, their subprocesses and later test runs share a compilation cache, separate from the user's.
os.environ["BERT_JAX_CACHE"] = os.path.join(tempfile.gettempdir(), "bert_jax_tests_cache")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["BERT_JAX_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import importlib.util
import pathlib

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Only in modules whose signatures give shapes: the checks take time in every call, and pyright checks other types.
ROOT = pathlib.Path(__file__).parents[1]
shaped = [p for p in (ROOT / "bert_jax").rglob("*.py") if "jaxtyping" in p.read_text()]
modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in shaped]
install_import_hook(modules, "beartype.beartype")

# Draw the same examples every time, so that a new failure comes from a change of the code;
# `make soak` draws others.
hypothesis.settings.register_profile(
    "fixed", derandomize="BERT_JAX_SOAK" not in os.environ, deadline=None
)
hypothesis.settings.load_profile("fixed")


# The slowest test files, which only `make test-all` runs: first, so that no worker starts one of them last.
LONGEST = (
    "sweep_clouds", "storage", "train", "finetune_runs", "checkpoint", "goldens", "finetuning", "electra", "families", "guard",
    "architectures", "convert", "sweep", "distributed", "lora", "continued", "fuzz", "profile", "distillation",
    "step_program", "launch", "convert_refused", "sentence_encoders", "contrastive", "preflight", "launch_tpu",
)  # fmt: skip


def pytest_configure():
    """Use the matmul implementation of the commands, and collect garbage less often."""
    from bert_jax.runtime import device

    device.use_eigen_matmul()
    gc.set_threshold(100_000, 50, 50)  # tracing allocates many long-lived objects


def has_gpu():
    """Return whether a newly started process would train on a GPU."""
    return (
        pathlib.Path("/dev/nvidia0").exists()
        and importlib.util.find_spec("jax_plugins") is not None
    )


def has_compilers():
    """Return whether the compilers for TPUs and GPUs are installed."""
    from bert_jax.runtime import device

    return importlib.util.find_spec("libtpu") is not None and device.has_cuda_plugin()


def pytest_collection_modifyitems(config, items):
    """Mark the slowest files and run them first; leave out tests that cannot run or run only every night.

    Nightly tests run if the option -m names their mark, as in `-m nightly`.
    """

    def place(item):
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
    if "nightly" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if "shared_data" in item.fixturenames:
            item.add_marker("data")
        if {"chromium", "smoke"} & {*item.fixturenames} or place(item) < len(LONGEST):
            item.add_marker("slow")
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a GPU and JAX's plugin for it"))
        if item.get_closest_marker("compile") and not has_compilers():
            item.add_marker(pytest.mark.skip(reason="needs the extras tpu and gpu-compile"))
        if item.get_closest_marker("tpu") and importlib.util.find_spec("libtpu") is None:
            reason = "needs libtpu, which compiles for TPUs: pip install -e '.[tpu]' (210 MB)"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared_data():
    """Function that returns a file by its path below $BERT_JAX_DATA; skips if it does not exist."""

    def find(name):
        path = pathlib.Path(os.environ.get("BERT_JAX_DATA", "/nonexistent"), name)
        if not path.exists():
            pytest.skip(f"needs {name} in a folder of data that $BERT_JAX_DATA names")
        return path

    return find


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Corpus file in Google's format: 60 documents of sentences from a small grammar."""
    from tests.helpers import corpus

    return corpus.write(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def rows(corpus):
    """Function (T, S) -> folder of rows of the corpus with sentence pairs."""
    from tests.helpers.corpus import write_rows

    return functools.partial(write_rows, corpus)


@pytest.fixture(scope="module")  # so that Playwright's event loop does not affect other tests
def chromium():
    """Headless Chromium driven by Playwright; skips if Chromium is not installed."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Chromium's sandbox cannot run as root, as tests in containers do; the pages are our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Function that opens an HTML file in the browser and returns the page.

    The test fails on console output, an uncaught error, or a request for anything but the file.
    """
    pages, wrong = [], []

    def open_page(path, **settings):
        page = chromium.new_page(**settings)
        pages.append(page)
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
        here = path.resolve().as_uri()
        page.on(
            "request",
            lambda request: (
                None
                if request.url.split("#")[0] == here or request.url.startswith("data:")
                else wrong.append(f"request: {request.url}")
            ),
        )
        page.goto(here)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not wrong, wrong


@pytest.fixture
def write_sweep_file(tmp_path):
    """Function that writes a sweep.py and returns its path."""

    def write(text, name="one"):
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sweep.py").write_text("from bert_jax.tools.sweep import Point, grid\n" + text)
        return folder / "sweep.py"

    return write


@pytest.fixture
def hf_folder(tmp_path):
    """Folder of a checkpoint with random weights, saved by transformers."""
    from tests.helpers import checkpoints

    return checkpoints.save_pretrained(checkpoints.torch_model(), tmp_path / "theirs")


@pytest.fixture
def make_point(tmp_path):
    """Write the script and return a function that makes points which run it."""
    from bert_jax.tools.sweep import Point
    from tests.helpers.sweeps import SCRIPT

    script = tmp_path / "work.py"
    script.write_text(SCRIPT)

    def make(name, *more, facts=None):
        return Point(name, ("python", script, name, tmp_path, *more), facts or {})

    make.calls = lambda: [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    return make


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Run with random weights, all pretraining heads and the vocabulary `checkpoints.WORDS`."""
    from bert_jax.config.model import ModelConfig
    from tests.helpers import checkpoints

    config = ModelConfig(
        layers=2, hidden=12, heads=3, feed_forward=20, vocab_size=len(checkpoints.WORDS),
        positions=24, vocab_multiple=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("ours") / "run"
    params = checkpoints.random_params(config, 3)
    return checkpoints.write_run(folder, config, params, checkpoints.WORDS)


@pytest.fixture(scope="session", autouse=True)
def single_device_meshes():
    """Give meshes without explicit settings one device, because eight are slow on two cores."""
    import jax

    from bert_jax.config.schema import MeshConfig
    from bert_jax.runtime import sharding

    make_mesh = sharding.make_mesh

    def make(config, devices=None):
        if devices is None and config == MeshConfig():
            devices = jax.devices()[:1]
        return make_mesh(config, devices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", make)
        yield
