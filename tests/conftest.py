"""Shared by all tests: shape checking, a quiet JAX on eight virtual CPU devices, a small corpus."""

import os
import random
import shutil
import tempfile

# Before JAX is imported anywhere. Eight devices let one process test every mesh; most of the time
# of tests on miniature models goes into compiling, so the compiler is told not to try hard.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
# Compiled programs of tests stay out of the user's cache.
os.environ["BERT_JAX_CACHE"] = os.path.join(tempfile.gettempdir(), "bert_jax_tests_cache")

import hypothesis
import pytest
from jaxtyping import install_import_hook

install_import_hook("bert_jax", "beartype.beartype")

# The same examples every time, so that a run of the tests fails by what changed; `make soak` draws
# others.
hypothesis.settings.register_profile("fixed", derandomize="BERT_JAX_SOAK" not in os.environ)
hypothesis.settings.load_profile("fixed")


def pytest_configure():
    """Tests compute as commands in processes of their own do, whose bits they compare with theirs."""
    from bert_jax import device

    device.use_fast_products()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A file in Google's format: 60 documents of sentences from a small grammar."""
    rng = random.Random(0)
    nouns = "king river mountain book child city teacher horse garden winter letter ship".split()
    verbs = "sees follows remembers leaves finds builds crosses describes".split()
    where = ["in the morning", "near the old bridge", "without a word", "after the war"]
    documents = []
    for _ in range(60):
        topic = rng.sample(nouns, 4)  # a document keeps to few nouns, so its pairs can be told
        documents.append(
            "\n".join(
                f"The {rng.choice(topic)} {rng.choice(verbs)} the {rng.choice(topic)} {rng.choice(where)}."
                for _ in range(rng.randint(4, 30))
            )
        )
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n\n".join(documents) + "\n")
    return path


@pytest.fixture(scope="session")
def rows(corpus):
    """A function (T, S) to a folder of rows of the corpus with sentence pairs."""
    from bert_jax.data import prepare, wordpiece

    vocab = corpus.parent / "vocab"
    wordpiece.train([str(corpus)], str(vocab), size=150)

    def make(tokens=32, sequences=3):
        folder = corpus.parent / f"rows_{tokens}_{sequences}"
        if not folder.exists():
            prepare.prepare(
                [str(corpus)],
                str(vocab),
                str(folder),
                tokens=tokens,
                sequences=sequences,
                heldout_fraction=0.1,
                workers=1,
            )
        return folder

    return make


@pytest.fixture(scope="module")  # its driver runs an event loop, which other tests would meet
def chromium():
    """A headless Chromium, driven by Playwright; skips where the machine has none."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Its sandbox refuses to run as root, as tests in containers do; the pages are our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """A function from an HTML file to its opened page.

    The test fails if anything was written to the console, thrown, or asked of anything but the file.
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
                if request.url.split("#")[0] == here or request.url.startswith(("data:", "blob:"))
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
def file_of(tmp_path):
    """Writes a sweep.py and gives its path."""

    def write(text, name="one"):
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sweep.py").write_text("from bert_jax.sweep import Point, grid\n" + text)
        return folder / "sweep.py"

    return write
