"""The wheel, built and used in an empty folder as after `pip install`, and the command line."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from bert_jax import __version__, cli
from bert_jax.config import fields, flags
from bert_jax.config.schema import Config, FinetuneConfig

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_wheel_pretrains_in_an_empty_folder(tmp_path):
    def python(*arguments: str, **environment: str) -> str:
        env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", **environment}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Dependencies come from this environment; .ci/run has one with no other packages.
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps")
    python(*pip, "--target", "site", str(ROOT))

    site = {"PYTHONPATH": str(tmp_path / "site")}
    (tmp_path / "text.txt").write_text(
        "\n".join(f"The {n} rivers run past the mill.\nIt turns the wheel.\n" for n in range(99))
    )
    # One process, as importing takes longer than the commands.
    commands = [
        "vocab --out vocab --size 150 text.txt",
        "prepare --vocab vocab --out rows --tokens 32 --workers 1 text.txt",
        "pretrain --config configs/pretrain.py:L1-H32-A2,32 --workdir run --rows rows --config.steps=2 "
        "--config.batch_size=8",
        "config pretrain:mini,128",
        "report run",
        "fill-mask --init run [MASK]",
    ]
    code = "import bert_jax.cli as cli, sys; print(cli.__file__)\n"
    code += "for command in sys.argv[1:]: print(command); assert cli.main(command.split()) == 0\n"
    code += "from bert_jax.errors import install_command; print(install_command('s3'))"
    output = python("-c", code, *commands, **site)
    assert str(tmp_path) in output
    assert "%" in output.partition(commands[-1])[2]
    assert f"bert_jax {__version__}, jax " in python("-m", "bert_jax", "--version", **site)
    assert (tmp_path / "report.html").read_text().count("masked_lm_loss") > 1
    assert "install 's3fs" in output
    # `launch` sends the installed package as a wheel without compiled modules, whose copy has the same files.
    for name in ("a", "b"):
        wheel = tmp_path / f"bert_jax-{__version__}-py3-none-any.whl"
        python("-m", "bert_jax.tools.launch.wheel", str(wheel), **site)
        python(*pip, "--no-compile", "--target", name, str(wheel))
        site = {"PYTHONPATH": str(tmp_path / name)}
    files = [{f.relative_to(tmp_path / n) for f in (tmp_path / n).rglob("*.*")} for n in "ab"]
    assert files[0] == files[1] == {f for f in files[0] if f.suffix != ".pyc"}
    assert pathlib.Path("bert_jax/tools/launch/scripts/tpu_worker.sh") in files[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretain"], "did you mean pretrain?"),
        (["pretrain", "--wordir", "x"], "did you mean --workdir?"),
        (["vocab", "--out", "x", "--size", "a", "y"], "--size"),
        (["pretrain", "--max_steps=9"], "did you mean --config.steps?"),
        (["pretrain", "--max_seq_length", "9"], "did you mean --config.phases[0].tokens?"),
        (["finetune", "--max_seq_length", "9"], "did you mean --config.task.tokens?"),
        (["finetune", "--warmup_steps", "9"], "did you mean --config.warmup_fraction?"),
        (["sweep", "--jobs", "0"], "--jobs: 0: it must be 1 or more"),
    ],
)
def test_command_line_error_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_suggestions_for_options_of_other_programs_exist():
    known = {
        option for verb in cli.parser().verbs.values() for option in verb._option_string_actions
    }
    known |= fields.flatten(Config()).keys() | fields.flatten(FinetuneConfig()).keys()
    guesses = {guess for guesses in flags._ELSEWHERE.values() for guess in guesses}
    assert {guess.partition("=")[0] for guess in guesses if " " not in guess} <= known


@pytest.mark.parametrize(("size", "status"), [(1, 2), (100_000, 0)])
def test_closed_pipe_ends_the_command_quietly(size, status):
    """The output exceeds the buffer of standard output, or is written at the end of the command."""
    code = (
        "from bert_jax import cli\n"
        "cli.main = lambda: print('x' * int(argv[0])) or int(argv[1])\n"
        "cli.console()"
    )
    code = f"argv = {[str(size), str(status)]}\n{code}"
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    argv = [sys.executable, "-c", code]
    process = subprocess.run(
        argv, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (status, "")


def test_only_failed_saves_of_orbax_lose_their_traceback(monkeypatch):
    for name in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: reported.append(failure.thread))
    cli._install_hooks()

    def run(module):
        scope = {"__name__": module}
        exec("def fail(): raise OSError(28, 'No space left on device')", scope)
        thread = threading.Thread(target=scope["fail"])
        thread.start()
        thread.join()
        return thread

    threads = [run(module) for module in ("orbax.checkpoint", "my.writer")]
    assert reported == threads[1:]
