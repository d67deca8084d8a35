"""Launching: commands of each engine, arguments that reach workers, restarts and errors."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from bert_jax import cli
from bert_jax.errors import UserError
from bert_jax.tools import launch
from bert_jax.tools.launch import engines, request

ROOT = pathlib.Path(__file__).parent.parent
COMMAND = "pretrain --config configs/pretrain.py:mini,128 --rows /shared/rows --workdir".split()
OPTIONS = {
    "tpu-vm": {"accelerator": "v5litepod-16", "zone": "us-west4-a"},
    "gke": {"accelerator": "v5e:4x4", "image": "registry/image"},
    "slurm": {"nodes": 2, "gpus": 4},
    "sky": {"accelerator": "H100:8"},
    "local": {},
}
ON = pytest.mark.parametrize("on", launch.ENGINES)


PREPARE = "prepare --vocab gs://b/vocab gs://b/text/* --out".split()
FINETUNE = "finetune --config configs/glue.py:rte --init gs://b/base --workdir".split()


def flags(on):
    return [f"--{key}={value}" for key, value in OPTIONS[on].items()]


def plan(on, *arguments, workdir="/shared/runs/one", name=None, env=(), command=(), **options):
    command = [*(command or COMMAND), workdir, *arguments]
    asked = launch.Request(command, workdir, "configs/pretrain.py", (), env, name)
    return launch.make_plan(on, asked, {**OPTIONS[on], **options})[1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a Git checkout with a few committed files."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / ".gitignore").write_text("__pycache__/\n")
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    return folder


@pytest.fixture(autouse=True)
def in_checkout(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "CHECKOUT", checkout)
    monkeypatch.setenv("BERT_JAX_LAUNCH", str(tmp_path / "jobs"))
    monkeypatch.chdir(checkout)
    # Only /tmp counts as a temporary folder here, whatever TMPDIR is.
    monkeypatch.setattr(request.tempfile, "gettempdir", lambda: "/tmp")


class Bench:
    """Fake programs, first on the PATH, that record the arguments of their calls."""

    def __init__(self, folder):
        self.bin, self.home = folder / "bin", folder / "home"
        self.calls_file = folder / "calls"
        self.bin.mkdir()
        self.home.mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "BENCH": str(folder),
            "WORKER_HOME": str(self.home),
        }

    def program(self, name, body="", records=True):
        path = self.bin / name
        record = f"{{ printf '%s\\0' {name} \"$@\"; printf '\\036\\0'; }} >> \"$CALLS\"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{record if records else ''}{body}\n")
        path.chmod(0o755)
        return path

    def calls(self, name=""):
        """Return the recorded argument lists, oldest first, and clear the record."""
        text = self.calls_file.read_bytes().decode() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        results = [call.split("\0")[:-1] for call in text.split("\036\0")[:-1]]
        return [call for call in results if call[0] == name] if name else results

    def bash(self, text, cwd=None):
        return subprocess.run(
            ["bash", "-c", text],
            env={**self.environment, "HOME": str(self.home)},
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def bench(tmp_path, monkeypatch):
    result = Bench(tmp_path)
    for key, value in result.environment.items():
        monkeypatch.setenv(key, value)
    return result


# Commands of each engine.


@ON
def test_dry_run_prints_commands_without_running_them(on, bench, capsys):
    for name in ("gcloud", "kubectl", "sbatch", "sky"):
        bench.program(name)
    workdir = "/shared/runs/My run_1"
    command = [*COMMAND, workdir, "--config.steps=7"]
    assert cli.main(["launch", "--on", on, *flags(on), "--dry-run", "--", *command]) == 0
    assert bench.calls() == []
    printed = capsys.readouterr().out
    quoted = workdir if on == "gke" else shlex.quote(workdir)
    assert quoted in printed.replace("'\"'\"'", "'")
    engine = {"tpu-vm": "gcloud compute tpus", "gke": "kubectl apply", "slurm": "sbatch"}
    assert {**engine, "sky": "sky jobs launch", "local": "BERT_JAX_PROCESS=1"}[on] in printed
    if on != "local":
        assert "my-run-1" in printed


@pytest.mark.parametrize("on", ["gke", "slurm", "sky"])
def test_dry_run_output_equals_the_real_calls(on, bench, capsys):
    for name in ("kubectl", "sbatch", "sky"):
        bench.program(name)
    secret = "hf_" + "x" * 30
    bench.environment["HF_TOKEN"] = os.environ["HF_TOKEN"] = secret
    extra = "--env=A=a b" if on == "gke" else "--extra=--queue=a b"
    arguments = ["launch", "--on", on, *flags(on), extra, "--", *COMMAND, "/s/it's"]
    try:
        assert cli.main(arguments) == 0
    finally:
        del os.environ["HF_TOKEN"]
    real = bench.calls()
    assert len(real) == 1
    assert on == "gke" or "--queue=a b" in real[0]
    output = capsys.readouterr()
    assert cli.main([*arguments[:3], "--dry-run", *arguments[3:]]) == 0
    printed = capsys.readouterr().out
    assert bench.bash(printed).returncode == 0
    assert bench.calls() == real
    # Secrets of the environment do not appear in arguments, files or output.
    sent = [str(real), printed, output.out, output.err]
    files = list(pathlib.Path(os.environ["BERT_JAX_LAUNCH"]).rglob("*.yaml"))
    assert bool(files) == (on != "slurm")
    sent += [path.read_text() for path in files]
    assert not [text for text in sent if secret in text]


def test_slurm_arguments(bench):
    bench.program("sbatch")
    assert launch.run(plan("slurm", restarts=3, extra=["--time=60"], env=["A=b c"])) == 0
    (call,) = bench.calls()
    script = call.index(str(ROOT / "launch" / "slurm.sh"))
    assert (
        call[1:script]
        == (
            "--job-name=one --output=one-%j.out --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=60"
        ).split()
    )
    python = ["env", "A=b c", sys.executable, "-m", "bert_jax"]
    assert call[script + 1 :] == ["--restarts=3", "--", *python, *COMMAND, "/shared/runs/one"]


def test_slurm_containers_and_modules(bench):
    made = plan("slurm", image="i.sqsh", mounts=["/shared", "/a:/b"], modules=["cuda/13", "gcc"])
    bench.program("srun", "exit 0")
    bench.program("module")
    (submit,) = made.before
    at = submit.index(str(ROOT / "launch" / "slurm.sh"))
    assert bench.bash(shlex.join(submit[at:])).returncode == 0
    *loads, run = bench.calls()
    assert loads == [["module", "load", "cuda/13"], ["module", "load", "gcc"]]
    options = ["--container-image=i.sqsh", "--container-mounts=/shared,/a:/b"]
    assert run[1:4] == ["--kill-on-bad-exit=1", *options]
    assert run[run.index("task") + 1 :] == ["bert-jax", *COMMAND, "/shared/runs/one"]


# Arguments that reach the workers.

VARIABLE = "A_VARIABLE"
HOSTILE = st.text(st.sampled_from("'\"\\$`!*?[]{}()<>|&;#~=%@^ -aé日🙂"), max_size=12)
PRINTABLE = st.one_of(HOSTILE, st.text(st.characters().filter(str.isprintable), max_size=12))
KNOWN = [
    'it\'s "$HOME" `id` $(id) $$ \\ %j !! ${a}',
    "$(HOME) $$(a) $$$(a)",
    *("--help", "", " ", "-", "@name {args} %USER% # -- ~ \\n", "*"),
]


@pytest.fixture
def worker(bench):
    """Yield a function that runs an engine's plan and returns what `bert-jax` receives there."""
    bench.program("bert-jax", f'printenv {VARIABLE} > "$BENCH/variable"')
    bench.program("venv/bin/bert-jax", "")
    shutil.copy(bench.bin / "bert-jax", bench.bin / "venv" / "bin" / "bert-jax")
    for folder in (bench.home, engines.CHECKOUT):
        if not (folder / "venv").is_symlink():
            (folder / "venv").symlink_to(bench.bin / "venv")
    (bench.home / "bert_jax").mkdir()
    bench.program("pip", records=False)
    bench.program("srun", 'shift; exec "$@"', records=False)

    def arrives(on, plan):
        if on == "local":
            process = plan.processes[0]
            assert launch.plan.run_processes([process])[0] == 0
        elif on == "slurm":
            (submit,) = plan.before
            at = submit.index(str(ROOT / "launch" / "slurm.sh"))
            subprocess.run(["bash", *submit[at:]], check=True, timeout=60)
        elif on == "tpu-vm":
            (script,) = plan.files.values()
            assert bench.bash(script).returncode == 0
        elif on == "gke":
            (text,) = plan.files.values()
            command, variables = in_a_pod(yaml.safe_load(text))
            names = [f"{name}={value}" for name, value in variables.items()]
            assert bench.bash(shlex.join(["env", *names, *command])).returncode == 0
        elif on == "sky":
            (text,) = plan.files.values()
            task = yaml.safe_load(text)
            names = [f"{name}={value}" for name, value in task["envs"].items()]
            assert (
                bench.bash(shlex.join(["env", *names, "bash", "-c", task["run"]])).returncode == 0
            )
        (call,) = bench.calls("bert-jax")
        variable = (bench.bin.parent / "variable").read_text()
        return call[1:], variable.removesuffix("\n")

    yield arrives
    (engines.CHECKOUT / "venv").unlink(missing_ok=True)


def in_a_pod(manifest):
    """Return the command and environment of a JobSet's container, expanded as by Kubernetes."""
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    variables = {"HOME": "/expanded", "a": "expanded"}

    def expand(text):  # third_party/forked/golang/expansion/expand.go
        return re.sub(
            r"\$\$|\$\(([^)]*)\)",
            lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
            text,
        )

    environment = {each["name"]: expand(each["value"]) for each in container["env"]}
    return [expand(part) for part in container["command"]], environment


@ON
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    database=None,
)
@example(values=KNOWN)
@given(values=st.lists(PRINTABLE, min_size=8, max_size=20))
def test_argument_values_reach_workers_unchanged(on, worker, bench, values, monkeypatch):
    assume(not any("://" in value for value in values))
    monkeypatch.setattr(engines, "python_command", lambda: [str(bench.bin / "bert-jax")])
    arguments = [*values, *(f"--config.task.data={value}" for value in values)]
    options = {"processes": 1} if on == "local" else {}
    made = plan(on, *arguments, env=[f"{VARIABLE}={values[0]}"], **options)
    assert worker(on, made) == ([*COMMAND, "/shared/runs/one", *arguments], values[0])


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@example(before="a", character="\n", after="b")
@example(before="", character="\x85", after="")
@given(
    before=st.text(),
    character=st.characters().filter(lambda c: not c.isprintable()),
    after=st.text(),
)
def test_unprintable_characters_are_rejected(before, character, after):
    for arguments, options in (([before + character + after], {}), ([], {"extra": [character]})):
        with pytest.raises(UserError, match="unprintable character") as refusal:
            plan("slurm", *arguments, **options)
        assert str(refusal.value).isprintable()


@pytest.mark.parametrize("value", ["a b'c", "$x", 'q"\\', "@name"])
def test_option_values_survive_yaml_quoting(value):
    (text,) = plan("sky", accelerator=value, name="x1").files.values()
    assert yaml.safe_load(text)["resources"]["accelerators"] == value
    (text,) = plan("gke", image=value, queue=value).files.values()
    manifest = yaml.safe_load(text)
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": value}
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["containers"][0]["image"] == value


# Slurm's script with fake Slurm programs; launch/test_slurm.sh tests it on a real Slurm.


@pytest.mark.parametrize(
    ("tasks", "restarted", "ends", "requeues"),
    [
        ((0,), 0, 0, False),
        ((75, 75), 0, 75, True),
        ((75, 75), 3, 75, False),  # restart limit reached
        ((2, 75), 0, 2, False),  # the other task was stopped because of this failure
        ((1, 75), 0, 1, False),
        ((137, 75), 0, 137, True),
        ((70,), 0, 70, False),
    ],
)
def test_slurm_requeues_after_interruption(tasks, restarted, ends, requeues, bench, monkeypatch):
    worst = 'shift; worst=0; for s in $TASKS; do export S=$s; "$@"; r=$?; ((r > worst)) && worst=$r; done; exit $worst'
    bench.program("srun", worst)
    bench.program("scontrol")
    monkeypatch.setenv("TASKS", " ".join(map(str, tasks)))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarted))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(len(tasks)))
    script = ["bash", ROOT / "launch" / "slurm.sh", "--restarts=3", "--", "bash", "-c"]
    expected = "auto" if len(tasks) > 1 else ""
    check = f'test "$BERT_JAX_DISTRIBUTED" = "{expected}" && exit "$S"'
    done = subprocess.run([*script, check], capture_output=True, text=True, timeout=60)
    assert done.returncode == ends, done.stderr
    assert bench.calls("scontrol") == ([["scontrol", "requeue", "17"]] if requeues else [])


def test_slurm_task_waits_for_the_final_save(bench):
    """SIGTERM also reaches the shell around the command, which must not exit before the command."""
    line = next(
        line for line in (ROOT / "launch" / "slurm.sh").read_text().split("\n") if "task=" in line
    )
    saves = "import os, signal, sys, time\nsignal.signal(15, lambda *a: (time.sleep(0.3), sys.exit(75)))\nprint('up', flush=True)\ntime.sleep(60)"
    task = subprocess.Popen(
        ["bash", "-c", f'{line}; exec bash -c "$task" task "$@"', "x", sys.executable, "-c", saves],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert task.stdout.readline() == b"up\n"
    os.killpg(task.pid, signal.SIGTERM)
    assert task.wait(timeout=60) == 75


# Cloud TPU VMs, simulated on this machine with a fake gcloud script.

GCLOUD = r"""
state=$BENCH/state
case "$*" in
  *"queued-resources describe"*)
    [ -s "$state" ] || exit 1
    head -n 1 "$state"
    [ "$(wc -l < "$state")" -le 1 ] || sed -i 1d "$state" ;;
  *"queued-resources create"*) [ ! -e "$BENCH/no-quota" ] || exit 1; cp "$BENCH/new" "$state" ;;
  *"queued-resources delete"*) : > "$state" ;;
  *"queued-resources scp"*)
    for part in "$@"; do case $part in /*) cp "$part" "$WORKER_HOME" ;; esac; done ;;
  *"queued-resources ssh"*)
    for part in "$@"; do case $part in --command=*) does=${part#--command=} ;; esac; done
    # As the real one does: split at spaces, joined again by ssh, read by the login shell.
    IFS=' ' read -r -a words <<< "$does"
    if [[ $does == *follow ]] && [ -s "$BENCH/lose" ]; then
      cp "$BENCH/lose" "$state"; : > "$BENCH/lose"; exit 255
    fi
    cd "$WORKER_HOME" && HOME=$WORKER_HOME bash -c "${words[*]}" ;;
esac
"""


@pytest.fixture
def cloud(bench, monkeypatch):
    """Return a function that launches on a fake slice of one worker; runs exit with `ends`."""
    folder = bench.bin.parent
    bench.program("gcloud", GCLOUD)
    bench.program("sudo", 'exec "$@"', records=False)
    # The fake service runs to completion before its log is followed.
    service = 'while [[ $1 == --* ]]; do shift; done; "$@" >> "$WORKER_HOME/job.log" 2>&1 || true'
    bench.program("systemd-run", service)
    bench.program("systemctl", '[ "$1" = show ] && echo 0 || exit 1', records=False)
    bench.program("python3", records=False)  # the real one installs uv
    uv = bench.program("uv", "", records=False)
    (bench.home / ".local" / "bin").mkdir(parents=True)
    shutil.move(uv, bench.home / ".local" / "bin" / "uv")
    (bench.home / "venv" / "bin").mkdir(parents=True)
    run = bench.program(
        "run",
        'echo "commit $(git rev-parse HEAD)"; s=$(head -n 1 "$BENCH/ends"); sed -i 1d "$BENCH/ends"; exit $s',
    )
    shutil.move(run, bench.home / "venv" / "bin" / "bert-jax")
    monkeypatch.setenv("TPU_SLICE_POLL_SECONDS", "0")
    (folder / "new").write_text("WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")

    def go(*ends, lose="", state="", **options):
        (folder / "ends").write_text("".join(f"{end}\n" for end in ends))
        (folder / "lose").write_text(lose)
        (folder / "state").write_text(state)
        status = launch.run(plan("tpu-vm", **options))
        calls = bench.calls()
        verbs = [c[4] for c in calls if c[0] == "gcloud" and c[3] == "queued-resources"]
        runs = sum(c[0] == "run" for c in calls)
        return status, [verb for verb in verbs if verb in ("create", "delete")], runs, calls

    return go


def test_tpu_slice_is_created_used_and_deleted(cloud, checkout, capfd):
    status, verbs, runs, calls = cloud(0, spot=True, project="p", extra=["--reserved"])
    assert (status, verbs, runs) == (0, ["create", "delete"], 1)
    create = next(call for call in calls if "create" in call)
    assert (
        create[4:]
        == (
            "create one --zone=us-west4-a --project=p --node-id=one --accelerator-type=v5litepod-16 "
            "--runtime-version=v2-alpha-tpuv5-lite --spot --reserved"
        ).split()
    )
    assert [call[1:] for call in calls if call[0] == "run"] == [[*COMMAND, "/shared/runs/one"]]
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True)
    assert f"commit {commit}" in capfd.readouterr().out  # from the worker's log


@pytest.mark.parametrize(
    ("ends", "options", "expected"),
    [
        ((75, 75, 0), {}, (0, ["create", "delete"], 3)),
        ((137, 0), {}, (0, ["create", "delete"], 2)),
        ((2,), {}, (2, ["create", "delete"], 1)),
        ((1,), {}, (70, ["create", "delete"], 1)),
        ((75, 75), {"restarts": 1}, (75, ["create", "delete"], 2)),
        ((0,), {"keep": True}, (0, ["create"], 1)),
        ((0,), {"state": "ACTIVE\n"}, (0, ["delete"], 1)),
        ((0,), {"state": "SUSPENDING\nSUSPENDED\n"}, (0, ["delete", "create", "delete"], 1)),
        ((0,), {"state": "FAILED\n"}, (0, ["delete", "create", "delete"], 1)),
        # The slice is preempted during the run; then, only the connection is lost.
        ((75, 0), {"lose": "SUSPENDED\n"}, (0, ["create", "delete", "create", "delete"], 2)),
        ((75, 0), {"lose": "ACTIVE\n"}, (0, ["create", "delete"], 2)),
    ],
)
def test_tpu_slice_resumes_after_interruption_and_preemption(ends, options, expected, cloud):
    assert cloud(*ends, **options)[:3] == expected


def test_tpu_slice_creation_failure_is_reported(cloud, bench):
    (bench.bin.parent / "new").write_text("PROVISIONING\nFAILED\n")
    with pytest.raises(UserError, match=r"tpu_slice\.sh .* exited with status 2"):
        cloud(0)
    (bench.bin.parent / "no-quota").touch()
    with pytest.raises(UserError, match=r"tpu_slice\.sh .* exited with status 2"):
        cloud(0)


def test_tpu_worker_does_not_restart_a_running_job(cloud, bench):
    cloud(0)
    bench.program("systemctl", "exit 0")
    done = bench.bash("bash tpu_worker.sh start ''")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in bench.calls()] == ["is-active"]


def test_tpu_vm_rejects_uncommitted_changes(checkout):
    (checkout / "configs" / "pretrain.py").open("a").write("\n")
    try:
        with pytest.raises(UserError, match=r"uncommitted changes \(configs/pretrain.py"):
            plan("tpu-vm")
        plan("sky")
    finally:
        subprocess.run(["git", "-C", checkout, "checkout", "--quiet", "."], check=True)


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("v5e:4x4,slices=2", "--node-count=2 --node-prefix=one --accelerator-type=v5litepod-16"),
        ("v4-8", "--node-id=one --accelerator-type=v4-8"),
        ("v5p:2x2x1", "--node-id=one --accelerator-type=v5p-8"),
        ("v5p:4x4x8", "--node-id=one --accelerator-type=v5p-256"),
        ("v5p:2x4x8", "--node-id=one --type=v5p --topology=2x4x8"),
        ("v6e:16x16", "--node-id=one --accelerator-type=v6e-256"),
    ],
)
def test_tpu_accelerator_becomes_gcloud_arguments(accelerator, expected):
    made = plan("tpu-vm", accelerator=accelerator)
    create = made.before[0]
    assert set(expected.split()) <= set(create)
    assert ("--node-id=one" in create) == ("slices" not in accelerator)
    for command in [*made.before[2:], made.processes[0].command]:
        assert {"queued-resources", "--worker=all", "--node=all"} <= set(command)


def test_tpu_worker_copies_its_log(cloud, bench, monkeypatch):
    """The log is copied every COPY_SECONDS and at the end."""
    monkeypatch.setenv("COPY_SECONDS", "0.05")
    python = bench.program(
        "venv-python", 'cat "$2" >> "$BENCH/copied"; echo "$3" > "$BENCH/copied_to"'
    )
    shutil.move(python, bench.home / "venv" / "bin" / "python")
    cloud(0, workdir="gs://mine/runs/one")
    folder = bench.bin.parent
    assert "commit" in (folder / "copied").read_text()
    host = subprocess.check_output("hostname", text=True).strip()
    assert (folder / "copied_to").read_text() == f"gs://mine/runs/one/logs/{host}.log\n"


# Validation against the schemas of SkyPilot and Kubernetes.


@pytest.mark.parametrize(
    "options",
    [
        {"accelerator": "H100:8", "nodes": 2, "env": ["A=b"]},
        {"accelerator": "tpu-v5litepod-16", "spot": True},
        {"accelerator": "", "image": "registry/image", "command": PREPARE},
    ],
)
def test_skypilot_task_is_valid(options):
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    import jsonschema
    import sky

    (text,) = plan("sky", "--rows", "a: 'b' #", **options).files.values()
    config = yaml.safe_load(text)
    jsonschema.validate(config, schemas.get_task_schema())
    jsonschema.validate(config["resources"], schemas.get_resources_schema())
    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    assert task.num_nodes == options.get("nodes", 1)
    (resources,) = task.resources
    assert resources.use_spot == options.get("spot", False)
    assert config["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    software = {"runtime_version": "v2-alpha-tpuv5-lite"} if "spot" in options else None
    assert config["resources"].get("accelerator_args") == software


@pytest.mark.parametrize(
    ("accelerator", "kind", "shape", "slices", "machines", "chips"),
    [
        ("v5e:4x4,slices=2", "tpu-v5-lite-podslice", "4x4", 2, 4, 4),
        ("v5litepod-1", "tpu-v5-lite-podslice", "1x1", 1, 1, 1),
        ("v4:2x2x4", "tpu-v4-podslice", "2x2x4", 1, 4, 4),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 1, 1, 4),
        ("v6e:2x4", "tpu-v6e-slice", "2x4", 1, 2, 4),
        ("tpu7x:4x4x4", "tpu7x", "4x4x4", 1, 16, 4),
        ("", "", "", 1, 1, 0),
    ],
)
def test_kubernetes_jobset_is_valid(accelerator, kind, shape, slices, machines, chips):
    """Validate against the schemas of Kubernetes and JobSet, as generated for their clients."""
    import kubernetes_validate
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    value = 'it\'s "$HOME" `id` {a} $$ # :'
    options = {"queue": "mine", "service_account": "bert", "spot": True, "restarts": 7}
    command = () if accelerator else PREPARE
    made = plan(
        "gke", value, accelerator=accelerator, env=["A=$(HOME)"], command=command, **options
    )
    (text,) = made.files.values()
    manifest = yaml.safe_load(text)
    parsed = JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert parsed["spec"]["replicatedJobs"] == manifest["spec"]["replicatedJobs"]
    assert parsed["spec"]["failurePolicy"] == manifest["spec"]["failurePolicy"]
    assert parsed["spec"]["failurePolicy"]["maxRestarts"] == 7
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    kubernetes_validate.validate(job | replicated["template"], "1.31", strict=True)

    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (replicated["replicas"], spec["completions"], spec["parallelism"]) == (
        *(slices, machines, machines),
    )
    names = {each["name"]: each["value"] for each in container["env"]}
    assert names["A"] == "$$(HOME)"
    assert names.get("BERT_JAX_DISTRIBUTED") == ("auto" if accelerator else None)
    selector = {"cloud.google.com/gke-spot": "true"}
    if accelerator:
        selector["cloud.google.com/gke-tpu-accelerator"] = kind
        selector["cloud.google.com/gke-tpu-topology"] = shape
    assert pod["nodeSelector"] == selector
    assert pod.get("hostNetwork", False) == (slices > 1)
    assert container["resources"] == ({"limits": {"google.com/tpu": chips}} if chips else {})
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2]}}


def test_dockerfile_files_and_extras_exist():
    import tomllib

    text = (ROOT / "launch" / "Dockerfile").read_text()
    for line in text.splitlines():
        if line.startswith("COPY "):
            assert all((ROOT / name).exists() for name in line.split()[1:-1])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {*re.findall(r"--extra (\w+)", text)} == {"gcs", "s3"}
    assert {"gcs", "s3", "tpu", "cuda"} <= set(extras)


# Jobs managed by name.


def test_detached_run_can_be_queried_and_stopped(bench, capsys, monkeypatch):
    """The run outlives the launch command, and its state and exit status are available by name."""
    program = bench.program("bert-jax", f"exec {sys.executable} -c {shlex.quote(SLEEPS)}")
    code = (
        f"from bert_jax.tools.launch import engines; engines.python_command = lambda: [{str(program)!r}]\n"
        "import sys; from bert_jax import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    monkeypatch.setattr(launch.jobs, "python_command", lambda: [sys.executable, "-c", code])
    arguments = ["launch", "--on", "local", "--processes", "1", "--detach"]
    assert cli.main([*arguments, "--", *COMMAND, "/shared/runs/one"]) == 0
    assert "one runs in the background" in capsys.readouterr().err
    log = pathlib.Path(os.environ["BERT_JAX_LAUNCH"]) / "one" / "log"
    for _ in range(1000):
        if "[0] up" in log.read_text():
            break
        time.sleep(0.02)
    assert cli.main(["launch", "status", "one"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"one: on local since .*, launcher running \(pid \d+\)", output)
    assert cli.main([*arguments, "--", *COMMAND, "/shared/runs/one"]) == 2
    assert "a launcher of one is running" in capsys.readouterr().err
    assert cli.main(["launch", "stop", "one"]) == 0
    capsys.readouterr()
    assert cli.main(["launch", "status", "one"]) == 0
    assert "launcher ended with status 75" in capsys.readouterr().out
    assert "[0] saved" in log.read_text()


def test_detached_run_that_fails_at_once_is_reported(capsys, monkeypatch):
    failing = ["bash", "-c", "echo no room; exit 3"]
    monkeypatch.setattr(launch.jobs, "python_command", lambda: failing)
    assert cli.main(["launch", "--on", "local", "--detach", "--", *COMMAND, "/s/r"]) == 2
    assert "the launcher failed: no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("on", "state", "output", "ends"),
    [
        ("slurm", ["squeue", "--name=one"], "tail", ["scancel", "--name=one"]),
        ("sky", ["sky", "jobs", "queue"], "sky", ["sky", "jobs", "cancel"]),
        ("gke", ["kubectl", "get"], "kubectl", ["kubectl", "delete", "jobset", "one"]),
    ],
)
def test_status_logs_and_stop_call_the_engine(on, state, output, ends, bench, capsys):
    for name in ("sbatch", "squeue", "scancel", "sky", "kubectl", "tail"):
        bench.program(name)
    command = ["launch", "--on", on, *flags(on), "--", *COMMAND, "/shared/runs/one"]
    assert cli.main(command) == 0
    assert "state: bert-jax launch status one" in capsys.readouterr().err
    bench.calls()
    for verb, expected in (("status", state), ("logs", [output]), ("stop", ends)):
        assert cli.main(["launch", verb, "one"]) == 0
        (call,) = bench.calls()
        assert call[: len(expected)] == expected
    assert cli.main([*command[:1], "--detach", *command[1:]]) == 2
    assert "queues the job and returns" in capsys.readouterr().err


def test_tpu_job_is_stopped_before_its_slice_is_deleted():
    made = plan("tpu-vm")
    assert made.stop[0][-1] == "--command=bash tpu_worker.sh stop"
    assert made.stop[1] == made.after[0]
    assert plan("tpu-vm", keep=True).stop == made.stop[:1]


# Several local processes.


def python(code, *arguments):
    return launch.Process([sys.executable, "-c", code, *arguments], {}, "[x] ")


def test_local_processes_share_a_coordinator_and_prefix_lines(capsys, monkeypatch):
    code = (
        "import os, sys; e = os.environ; "
        "print(e['BERT_JAX_PROCESS'], e['BERT_JAX_PROCESSES'], e['BERT_JAX_COORDINATOR'], e['XLA_FLAGS']);"
        "sys.stderr.write('no newline')"
    )
    monkeypatch.setattr(engines, "python_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setenv("XLA_FLAGS", "--old")
    assert launch.run(plan("local", processes=3, devices=4)) == 0
    output = capsys.readouterr()
    lines = sorted(output.out.split("\n")[:-1])
    coordinator = lines[0].split()[3]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)
    flag = "--old --xla_force_host_platform_device_count=4"
    assert lines == [f"[{i}] {i} 3 {coordinator} {flag}" for i in range(3)]
    assert sorted(output.err.split("\n"))[1:] == [f"[{i}] no newline" for i in range(3)]


SLEEPS = "import signal, sys, time\n" + (
    "def save(*_):\n    print('saved', flush=True); sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)\n"
    "print('up', flush=True)\ntime.sleep(600)"
)
DEAF = "import signal, time\n" + (
    "signal.signal(signal.SIGTERM, lambda *_: None)\nprint('up', flush=True)\ntime.sleep(600)"
)


def ends(status, when):
    """Return a process that exits with `status` once the file `when` exists."""
    return python(
        "import os, sys, time\n"
        f"while not os.path.exists({str(when)!r}): time.sleep(0.01)\n"
        f"os.kill(os.getpid(), 9) if {status} == 137 else sys.exit({status})"
    )


@pytest.mark.parametrize(
    ("statuses", "counts"),
    [([0, 0], 0), ([75, 75], 75), ([137], 137), ([1], 1), ([75], 75), ([2], 2)],
)
def test_exit_status_of_several_processes(statuses, counts, tmp_path):
    (tmp_path / "go").touch()
    others = [python(SLEEPS)] if len(statuses) == 1 else []
    processes = [ends(status, tmp_path / "go") for status in statuses]
    assert launch.plan.run_processes([*processes, *others]) == (counts, False)


def test_status_2_overrides_an_earlier_status(tmp_path):
    late = python("import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(2))\n"
                  f"open({str(tmp_path / 'go')!r}, 'w').close()\ntime.sleep(600)")  # fmt: skip
    assert launch.plan.run_processes([late, ends(75, tmp_path / "go")]) == (2, False)


def test_process_that_ignores_sigterm_is_killed(tmp_path):
    deaf = python(
        DEAF.replace("print('up'", f"open({str(tmp_path / 'go')!r}, 'w').close(); print('up'")
    )
    status, _ = launch.plan.run_processes([deaf, ends(1, tmp_path / "go")], stop_seconds=0.2)
    assert status == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded_and_prevent_restarts(number, capsys):
    def send():
        while capsys_text().count("up") < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    printed = []

    def capsys_text():
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    sender = threading.Thread(target=send)
    sender.start()
    two = launch.Plan(processes=[python(SLEEPS), python(SLEEPS)], again=frozenset({75}), restarts=5)
    assert launch.run(two) == 75  # no restart
    sender.join()
    assert capsys_text().count("saved") == 2
    assert capsys_text().count("up") == 2


@pytest.mark.parametrize(
    ("statuses", "restarts", "last", "runs"),
    [
        ("75 75 0", 5, 0, 3),
        ("75 75 75", 1, 75, 2),
        ("2 0", 5, 2, 1),
        ("1 0", 5, 1, 1),
        ("137 0", 1, 0, 2),
    ],
)
def test_local_run_restarts_after_interruption(statuses, restarts, last, runs, bench, monkeypatch):
    file = bench.bin.parent / "statuses"
    file.write_text("\n".join(statuses.split()) + "\n")
    body = f"s=$(head -n 1 {file}); sed -i 1d {file}; [ $s != 137 ] || kill -9 $$; exit $s"
    program = bench.program("bert-jax", body)
    monkeypatch.setattr(engines, "python_command", lambda: [str(program)])
    assert launch.run(plan("local", processes=1, restarts=restarts)) == last
    assert len(bench.calls()) == runs


def test_launch_command_runs_two_real_processes(tmp_path):
    """`bert-jax launch` starts real `python -m bert_jax` processes; a user error ends both."""
    command = [*COMMAND, tmp_path / "run", "--rows=/one/too/many"]
    started = [sys.executable, "-m", "bert_jax", "launch", "--on", "local", "--", *command]
    done = subprocess.run(started, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert re.search(r"^\[[01]\] bert-jax pretrain: ", done.stderr, re.MULTILINE), done.stderr


# User errors.


@pytest.mark.parametrize(
    ("on", "program", "advice"),
    [
        ("tpu-vm", "gcloud", "Google Cloud CLI"),
        ("gke", "kubectl", "get-credentials"),
        ("slurm", "sbatch", "login node"),
        ("sky", "sky", "skypilot"),
    ],
)
def test_missing_program_error_gives_advice(on, program, advice, tmp_path, monkeypatch, capsys):
    for name in ("bash", "git"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", "--on", on, *flags(on), "--", *COMMAND, "/s/r"]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"bert-jax launch: {program} is not on the PATH: ")
    assert advice in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "local"], "after --"),
        (["--on", "local", "--"], "after --"),
        (["--on", "local", "--", "report", "x"], "give pretrain, finetune, prepare or sweep"),
        (["--", *COMMAND, "/w"], "give --on ENGINE"),
        (["status"], "give status, logs or stop and the NAME"),
        (["pause", "one"], "give status, logs or stop and the NAME"),
        (["status", "one", "--on", "local"], "takes no options"),
        (["logs", "none"], "no job none was launched by this user"),
        (["--on", "local", "--env", "A", "--", *COMMAND, "/w"], "--env A: it must be NAME=VALUE"),
        (["--on", "local", "--env=A=hf_" + "a" * 34, "--", *COMMAND, "/w"], "--env A looks like a credential"),
        (["--on", "local", "--", *COMMAND, "/w", "--config.stepz=1"], "steps"),
        (["--on", "local", "--zone", "a", "--", *COMMAND, "/w"], "--zone is not an option of --on local"),
        (["--on", "sky", "--", *COMMAND, "/w"], "--on sky needs --accelerator"),
        (["--on", "slurm", "--nodes", "0", "--", *COMMAND, "/w"], "--nodes 0: it must be 1 or more"),
        (["--on", "slurm", "--name", "No", "--", *COMMAND, "/w"], "--name No"),
        (["--on", "slurm", "--", *COMMAND, "az://b/runs"], "az://b/runs: paths are local, gs://… or s3://…"),
        (["--on", "local", "--", *COMMAND, "/w", "--rows=http://b/rows"], "http://b/rows: "),
        (["--on", "slurm", "--extra=a\nb", "--", *COMMAND, "/w"], "--extra 'a\\nb' contains a line break"),
        (["--on", "slurm", "--extra=--comment=hf_" + "a" * 34, "--", *COMMAND, "/w"], "--extra looks like a credential"),
        (["--on", "tpu-vm", *flags("tpu-vm"), "--", *COMMAND, "runs/one"], "give a folder on object storage"),
        (["--on", "gke", *flags("gke"), "--", *COMMAND, os.path.expanduser("~/runs")], "give a folder on object storage"),
        (["--on", "sky", *flags("sky"), "--", *COMMAND, "/tmp/run"], "give a folder on object storage"),
        (["--on", "sky", *flags("sky"), "--", *COMMAND, "gs://b/run", "--rows=configs"], "configs is on this machine only"),
        (["--on", "tpu-vm", "--zone=z", "--accelerator=v99-8", "--", *COMMAND, "/w"], "unknown accelerator type"),
        (["--on", "tpu-vm", "--zone=z", "--accelerator=tpu7x:2x2x1", "--", *COMMAND, "/w"], "choose from v4, v5e, v5p, v6e"),
        (["--on", "gke", "--image=i", "--accelerator=h100:8", "--", *COMMAND, "gs://b/r"], "choose from v4"),
        (["--on", "tpu-vm", *flags("tpu-vm"), "--", *PREPARE, "gs://b/rows"], "prepare runs in one"),
        (["--on", "gke", *flags("gke"), "--", *PREPARE, "gs://b/rows"], "prepare runs in one process, on CPUs"),
        (["--on", "gke", "--image=i", "--", *COMMAND, "gs://b/r"], "--on gke needs --accelerator for pretrain"),
        (["--on", "slurm", "--nodes=2", "--", *PREPARE, "/s/rows"], "prepare runs on one machine"),
        (["--on", "local", "--processes=2", "--", *PREPARE, "/s/rows"], "prepare runs in one process"),
        (["--on", "sky", "--", *PREPARE, "rows"], "give a folder on object storage"),
        (["--on", "tpu-vm", "--zone=z", "--accelerator=v5e:4x4", "--", *FINETUNE, "gs://b/r"], "finetune runs on one machine, of at most 8 chips"),
        (["--on", "tpu-vm", "--zone=z", "--accelerator=v5e:2x2,slices=2", "--", *FINETUNE, "gs://b/r"], "finetune runs on one machine"),
        (["--on", "tpu-vm", "--zone=z", "--accelerator=v4:2x2x2", "--", *FINETUNE, "gs://b/r"], "of at most 4 chips"),
        (["--on", "sky", "--accelerator=tpu-v5litepod-16", "--", *FINETUNE, "gs://b/r"], "finetune runs on one machine"),
        (["--on", "gke", "--image=i", "--accelerator=v5e:4x4", "--", *FINETUNE, "gs://b/r"], "finetune runs on one machine"),
        (["--on", "gke", "--image=i", "--", *FINETUNE, "gs://b/r"], "--on gke needs --accelerator for finetune"),
        (["--on", "slurm", "--nodes=2", "--", *FINETUNE, "/s/r"], "finetune runs on one machine"),
        (["--on", "gke", *flags("gke"), "--", "sweep", "experiments/table8_masking", "--runs", "/s"], "sweep runs on one machine"),
    ],
)  # fmt: skip
def test_user_errors_are_one_line(arguments, message, capsys):
    assert cli.main(["launch", *arguments]) == 2
    output = capsys.readouterr().err
    assert message in output, output
    assert output.count("\n") == 1
    assert "hf_" not in output


def test_gke_rejects_a_config_outside_the_checkout(tmp_path, capsys):
    shutil.copy(ROOT / "configs" / "pretrain.py", tmp_path / "mine.py")
    command = ["pretrain", "--config", f"{tmp_path / 'mine.py'}:mini,128", "--workdir", "/w"]
    assert cli.main(["launch", "--on", "gke", *flags("gke"), "--", *command]) == 2
    assert "workers run in a copy of" in capsys.readouterr().err
    assert cli.main(["launch", "--on", "slurm", "--dry-run", "--", *command]) == 0


def test_unknown_engine_is_rejected(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["launch", "--on", "cloud", "--", *COMMAND, "/w"])
    assert stop.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_failed_submission_is_reported(bench):
    bench.program("sbatch", "echo no such partition >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch .* exited with status 1$"):
        launch.run(plan("slurm"))


@ON
def test_job_names(on):
    assert launch.job_name("Run_7 (b)") == "run-7-b"
    assert launch.job_name("128") == "bert-128"
    assert launch.job_name("日") == "bert"
    text = launch.script(plan(on, name="fine-1"))
    assert on == "local" or "fine-1" in text


@pytest.mark.parametrize("on", ["local", "slurm", "sky"])
def test_single_process_verbs_are_not_distributed(on, capsys):
    """If the variables of distributed runs were set, they would wait for other processes."""
    sweep = ["sweep", "experiments/table8_masking", "--runs", "/shared/runs"]
    finetune = [*FINETUNE, "gs://b/run"]
    for run in ([*PREPARE, "gs://b/rows"], sweep, finetune):
        options = (
            {"slurm": ["--gpus=8"], "sky": ["--accelerator=H100:8"]} if run is finetune else {}
        )
        assert cli.main(["launch", "--on", on, *options.get(on, []), "--dry-run", "--", *run]) == 0
        text = capsys.readouterr().out
        assert "BERT_JAX" not in text
        assert run[-1] in text
        assert on != "slurm" or "--ntasks-per-node=1" in text
        assert on != "local" or "[1]" not in text


@pytest.mark.parametrize(
    ("options", "accelerator"),
    [
        (["tpu-vm", "--zone=z"], "v5e:2x4"),
        (["tpu-vm", "--zone=z"], "v4:2x2x1"),
        (["sky"], "tpu-v5litepod-8"),
        (["gke", "--image=i"], "v5e:2x2"),
    ],
)
def test_fine_tuning_runs_on_a_tpu_slice_with_one_machine(options, accelerator, capsys):
    arguments = ["--on", *options, f"--accelerator={accelerator}", "--dry-run", "--"]
    assert cli.main(["launch", *arguments, *FINETUNE, "gs://b/run"]) == 0
    assert "finetune" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_are_executable_and_valid_bash(path):
    assert path.stat().st_mode & stat.S_IXUSR
    assert subprocess.run(["bash", "-n", path]).returncode == 0
