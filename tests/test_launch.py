"""Launching: what each engine is called with, what reaches the workers, and who is run again."""

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
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from bert_jax import cli
from bert_jax.errors import UserError
from bert_jax.tools import launch

ROOT = pathlib.Path(__file__).parent.parent
COMMAND = "pretrain --config configs/pretrain.py:mini,128 --rows /shared/rows --workdir".split()
OPTIONS = {
    "tpu-vm": {"accelerator": "v5litepod-16", "zone": "us-west4-a"},
    "gke": {"accelerator": "v5litepod-16", "zone": "us-west4-a", "cluster": "mine"},
    "slurm": {"nodes": 2, "gpus": 4},
    "sky": {"accelerator": "H100:8"},
    "local": {},
}
ON = pytest.mark.parametrize("on", launch.ENGINES)


def flags(on):
    return [f"--{key}={value}" for key, value in OPTIONS[on].items()]


def plan(on, *arguments, workdir="/shared/runs/one", name=None, **options):
    command = [*COMMAND, workdir, *arguments]
    options = {**OPTIONS[on], **options}
    return launch.plan(on, command, "configs/pretrain.py", workdir, name, options)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A committed checkout of a few files."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / ".gitignore").write_text("/.launch/\n__pycache__/\n")
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    return folder


@pytest.fixture(autouse=True)
def in_checkout(checkout, monkeypatch):
    monkeypatch.setattr(launch, "CHECKOUT", checkout)
    monkeypatch.chdir(checkout)
    # Temporary folders are where the tests stand, and are nobody's home here.
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: "/tmp")


class Bench:
    """Stand-ins for programs, found before the real ones, and what they were called with."""

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
        """Argument lists, oldest first; and forgets them."""
        text = self.calls_file.read_bytes().decode() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        found = [call.split("\0")[:-1] for call in text.split("\036\0")[:-1]]
        return [call for call in found if call[0] == name] if name else found

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
    found = Bench(tmp_path)
    for key, value in found.environment.items():
        monkeypatch.setenv(key, value)
    return found


# What is called.


@ON
def test_dry_run_prints_the_commands_and_calls_nothing(on, bench, capsys):
    for name in ("gcloud", "xpk", "sbatch", "sky"):
        bench.program(name)
    workdir = "/shared/runs/My run_1"
    command = [*COMMAND, workdir, "--config.steps=7"]
    assert cli.main(["launch", "--on", on, *flags(on), "--dry-run", "--", *command]) == 0
    assert bench.calls() == []
    printed = capsys.readouterr().out
    assert shlex.quote(workdir) in printed.replace("'\"'\"'", "'")
    engine = {"tpu-vm": "gcloud compute tpus", "gke": "xpk workload create", "slurm": "sbatch"}
    assert {**engine, "sky": "sky jobs launch", "local": "BERT_JAX_PROCESS=1"}[on] in printed
    if on != "local":
        assert "my-run-1" in printed


@pytest.mark.parametrize("on", ["gke", "slurm", "sky"])
def test_what_is_printed_is_what_is_called(on, bench, capsys):
    for name in ("xpk", "sbatch", "sky"):
        bench.program(name)
    secret = "hf_" + "x" * 30
    bench.environment["HF_TOKEN"] = os.environ["HF_TOKEN"] = secret
    arguments = ["launch", "--on", on, *flags(on), "--extra=--queue=a b", "--", *COMMAND, "/s/it's"]
    try:
        assert cli.main(arguments) == 0
    finally:
        del os.environ["HF_TOKEN"]
    real = bench.calls()
    assert len(real) == 1
    assert "--queue=a b" in real[0]
    told = capsys.readouterr()
    assert cli.main([*arguments[:3], "--dry-run", *arguments[3:]]) == 0
    printed = capsys.readouterr().out
    assert bench.bash(printed).returncode == 0
    assert bench.calls() == real
    # Nobody's environment is in arguments, files or what is printed.
    sent = [str(real), printed, told.out, told.err]
    sent += [path.read_text() for path in (launch.CHECKOUT / ".launch").rglob("*.yaml")]
    assert not [text for text in sent if secret in text]


def test_slurm_arguments(bench):
    bench.program("sbatch")
    assert launch.run(plan("slurm", restarts=3, extra=["--time=60"])) == 0
    (call,) = bench.calls()
    script = call.index(str(ROOT / "launch" / "slurm.sh"))
    assert call[1:script] == (
        "--job-name=one --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=60".split()
    )
    expected = ["3", sys.executable, "-m", "bert_jax", *COMMAND, "/shared/runs/one"]
    assert call[script + 1 :] == expected


def test_gke_restarts_75_and_waits_for_it_to_save(bench):
    bench.program("xpk")
    assert launch.run(plan("gke", spot=True, image="gcr.io/p/i", restarts=4)) == 0
    (call,) = bench.calls()
    assert {"--restart-on-exit-codes=75", "--max-restarts=4", "--spot"} < set(call)
    assert "--env=BERT_JAX_DISTRIBUTED=auto" in call
    assert "--docker-image=gcr.io/p/i" in call
    assert not [part for part in call if part.startswith(("--base-docker-image", "--script-dir"))]


# What reaches the workers.

HOSTILE = st.text(st.sampled_from("'\"\\$`!*?[]{}()<>|&;#~=%@^ -aé日🙂"), max_size=12)
PRINTABLE = st.one_of(HOSTILE, st.text(st.characters().filter(str.isprintable), max_size=12))
KNOWN = [
    'it\'s "$HOME" `id` $(id) $$ \\ %j !! ${a}',
    "$(HOME) $$(a) $$$(a)",
    *("--help", "", " ", "-", "@name {args} %USER% # -- ~ \\n", "*"),
]


@pytest.fixture
def worker(bench):
    """A function from an engine and its plan to the arguments that `bert-jax` starts with there."""
    bench.program("bert-jax", "exit 0")
    bench.program("venv/bin/bert-jax", "")
    shutil.copy(bench.bin / "bert-jax", bench.bin / "venv" / "bin" / "bert-jax")
    for folder in (bench.home, launch.CHECKOUT):
        if not (folder / "venv").is_symlink():
            (folder / "venv").symlink_to(bench.bin / "venv")
    (bench.home / "bert_jax").mkdir()
    bench.program("pip", records=False)
    bench.program("srun", 'shift; exec "$@"', records=False)

    def arrives(on, plan):
        if on == "local":
            process = plan.processes[0]
            assert launch.run_processes([process])[0] == 0
        elif on == "slurm":
            (submit,) = plan.before
            at = submit.index(str(ROOT / "launch" / "slurm.sh"))
            subprocess.run(["bash", *submit[at:]], check=True, timeout=60)
        elif on == "tpu-vm":
            (script,) = plan.files.values()
            assert bench.bash(script).returncode == 0
        elif on == "gke":
            line = next(p for p in plan.before[0] if p.startswith("--command="))
            assert bench.bash(in_a_pod(line.removeprefix("--command="))).returncode == 0
        elif on == "sky":
            yaml = pytest.importorskip("yaml")
            (text,) = plan.files.values()
            assert bench.bash(yaml.safe_load(text)["run"]).returncode == 0
        (call,) = bench.calls("bert-jax")
        return call[1:]

    yield arrives
    (launch.CHECKOUT / "venv").unlink(missing_ok=True)


def in_a_pod(command):
    """xpk's wrapper (core/docker_container.py) through YAML and Kubernetes' own expansion."""
    yaml = pytest.importorskip("yaml")
    text = f"command:\n- |\n  echo XPK Start: $(date);\n  ({command}) & PID=$!;\n  wait $PID\n"
    (line,) = yaml.safe_load(text)["command"]
    variables = {"HOME": "/expanded", "a": "expanded"}

    def expand(match):  # third_party/forked/golang/expansion/expand.go
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", expand, line)


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
def test_any_value_arrives_as_it_is(on, worker, bench, values, monkeypatch):
    assume(not any("://" in value for value in values))
    monkeypatch.setattr(launch, "python_command", lambda: [str(bench.bin / "bert-jax")])
    arguments = [*values, *(f"--config.task.data={value}" for value in values)]
    made = plan(on, *arguments, **({"processes": 1} if on == "local" else {}))
    assert worker(on, made) == [*COMMAND, "/shared/runs/one", *arguments]


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@example(before="a", character="\n", after="b")
@example(before="", character="\x85", after="")
@given(
    before=st.text(),
    character=st.characters().filter(lambda c: not c.isprintable()),
    after=st.text(),
)
def test_what_may_not_arrive_is_refused(before, character, after):
    for arguments, options in (([before + character + after], {}), ([], {"extra": [character]})):
        with pytest.raises(UserError, match="unprintable character") as refusal:
            plan("slurm", *arguments, **options)
        assert str(refusal.value).isprintable()


@pytest.mark.parametrize("value", ["a b'c", "$x", 'q"\\', "@name"])
def test_options_arrive_too(value, bench):
    yaml = pytest.importorskip("yaml")
    (text,) = plan("sky", accelerator=value, name="x1").files.values()
    assert yaml.safe_load(text)["resources"]["accelerators"] == value
    bench.program("xpk")
    launch.run(plan("gke", cluster=value, project=value))
    (call,) = bench.calls()
    assert {f"--cluster={value}", f"--project={value}"} < set(call)


# Slurm's script: its engine is Slurm, which launch/test_slurm.sh starts for real.


@pytest.mark.parametrize(
    ("tasks", "restarted", "ends", "requeues"),
    [
        ((0,), 0, 0, False),
        ((75, 75), 0, 75, True),
        ((75, 75), 3, 75, False),  # often enough
        ((2, 75), 0, 2, False),  # the other was stopped because of it
        ((1, 75), 0, 1, False),
        ((137, 75), 0, 137, True),
        ((70,), 0, 70, False),
    ],
)
def test_slurm_queues_again_after_75(tasks, restarted, ends, requeues, bench, monkeypatch):
    worst = 'shift; worst=0; for s in $TASKS; do export S=$s; "$@"; r=$?; ((r > worst)) && worst=$r; done; exit $worst'
    bench.program("srun", worst)
    bench.program("scontrol")
    monkeypatch.setenv("TASKS", " ".join(map(str, tasks)))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarted))
    script = ["bash", ROOT / "launch" / "slurm.sh", "3", "bash", "-c"]
    check = 'test "$BERT_JAX_DISTRIBUTED" = auto && exit "$S"'
    done = subprocess.run([*script, check], capture_output=True, text=True, timeout=60)
    assert done.returncode == ends, done.stderr
    assert bench.calls("scontrol") == ([["scontrol", "requeue", "17"]] if requeues else [])


def test_slurm_task_waits_for_a_run_that_saves(bench):
    """SIGTERM reaches the shell around the command too; it must not end before the command."""
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


# Cloud TPU VMs, on a machine that is none: gcloud's part is played by a script.

GCLOUD = r"""
state=$BENCH/state
case "$*" in
  *"queued-resources describe"*)
    [ -s "$state" ] || exit 1
    head -n 1 "$state"
    [ "$(wc -l < "$state")" -le 1 ] || sed -i 1d "$state" ;;
  *"queued-resources create"*) [ ! -e "$BENCH/no-quota" ] || exit 1; cp "$BENCH/new" "$state" ;;
  *"queued-resources delete"*) : > "$state" ;;
  *"tpu-vm scp"*)
    for part in "$@"; do case $part in /*) cp "$part" "$WORKER_HOME" ;; esac; done ;;
  *"tpu-vm ssh"*)
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
    """A slice of one worker whose command ends with the statuses of the file `ends`, in turn."""
    folder = bench.bin.parent
    bench.program("gcloud", GCLOUD)
    bench.program("sudo", 'exec "$@"', records=False)
    # The service runs to its end before it is followed.
    service = 'while [[ $1 == --* ]]; do shift; done; "$@" >> "$WORKER_HOME/job.log" 2>&1 || true'
    bench.program("systemd-run", service)
    bench.program("systemctl", '[ "$1" = show ] && echo 0 || exit 1', records=False)
    bench.program("python3", records=False)  # installs uv
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
        return status, [verb for verb in verbs if verb != "describe"], runs, calls

    return go


def test_tpu_slice_is_made_used_and_deleted(cloud, checkout, capfd):
    status, verbs, runs, calls = cloud(0, spot=True, project="p", extra=["--reserved"])
    assert (status, verbs, runs) == (0, ["create", "delete"], 1)
    create = next(call for call in calls if "create" in call)
    assert (
        create[4:]
        == (
            "create one --node-id=one --zone=us-west4-a --project=p --accelerator-type=v5litepod-16 "
            "--runtime-version=v2-alpha-tpuv5-lite --spot --reserved"
        ).split()
    )
    assert [call[1:] for call in calls if call[0] == "run"] == [[*COMMAND, "/shared/runs/one"]]
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True)
    assert f"commit {commit}" in capfd.readouterr().out  # the worker's log, followed


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
        # Taken back while it ran; and only the connection was lost.
        ((75, 0), {"lose": "SUSPENDED\n"}, (0, ["create", "delete", "create", "delete"], 2)),
        ((75, 0), {"lose": "ACTIVE\n"}, (0, ["create", "delete"], 2)),
    ],
)
def test_tpu_slice_goes_on_after_75_and_preemption(ends, options, expected, cloud):
    assert cloud(*ends, **options)[:3] == expected


def test_tpu_slice_that_cannot_be_made(cloud, bench):
    (bench.bin.parent / "new").write_text("PROVISIONING\nFAILED\n")
    with pytest.raises(UserError, match=r"tpu_slice\.sh .* exited with status 2"):
        cloud(0)
    (bench.bin.parent / "no-quota").touch()
    with pytest.raises(UserError, match=r"tpu_slice\.sh .* exited with status 2"):
        cloud(0)


def test_tpu_worker_leaves_a_running_job_alone(cloud, bench):
    cloud(0)
    bench.program("systemctl", "exit 0")
    done = bench.bash("bash tpu_worker.sh start")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in bench.calls()] == ["is-active"]


def test_tpu_vm_sends_commits_only(checkout):
    (checkout / "configs" / "pretrain.py").open("a").write("\n")
    try:
        with pytest.raises(UserError, match=r"uncommitted changes \(configs/pretrain.py"):
            plan("tpu-vm")
        plan("gke")
    finally:
        subprocess.run(["git", "-C", checkout, "checkout", "--quiet", "."], check=True)


# SkyPilot's and Kubernetes' own opinion.


@pytest.mark.parametrize(
    "options",
    [
        {"accelerator": "H100:8", "nodes": 2},
        {
            "accelerator": "tpu-v5litepod-16",
            "spot": True,
            "bucket": "gs://mine",
            "workdir": "/bucket/a",
        },
    ],
)
def test_skypilot_takes_the_job(options):
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    import jsonschema
    import yaml

    (text,) = plan("sky", "--rows", "a: 'b' #", **options).files.values()
    config = yaml.safe_load(text)
    jsonschema.validate(config, schemas.get_task_schema())
    jsonschema.validate(config["resources"], schemas.get_resources_schema())
    assert config["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    software = {"runtime_version": "v2-alpha-tpuv5-lite"} if "bucket" in options else {}
    assert config["resources"]["accelerator_args"] == software
    assert config["num_nodes"] == options.get("nodes", 1)
    if "bucket" in options:
        mount = config["file_mounts"]["/bucket"]
        jsonschema.validate(mount, schemas.get_storage_schema())
        assert mount["source"] == "gs://mine"


def test_xpk_makes_a_job_that_kubernetes_takes(tmp_path):
    xpk = shutil.which("xpk", path=os.path.dirname(sys.executable))
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    if not xpk:
        pytest.skip("pip install xpk")
    import yaml

    value = 'it\'s "$HOME" `id` {a} $$ # :'
    made = plan("gke", value, restarts=7, image="gcr.io/p/i", project="p")
    manifest = tmp_path / "job.yaml"
    command = [xpk, *made.before[0][1:], "--dry-run", f"--output-manifest-file={manifest}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert manifest.exists(), done.stdout + done.stderr
    job = yaml.safe_load(manifest.read_text())
    assert job["kind"] == "JobSet"
    assert job["spec"]["failurePolicy"]["maxRestarts"] == 7
    template = job["spec"]["replicatedJobs"][0]["template"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
    validate.validate(inner, "1.31", strict=True)
    (rule,) = template["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["operator"] == "NotIn"
    assert 75 in rule["onExitCodes"]["values"]
    assert not {0, 1, 2} & set(rule["onExitCodes"]["values"])
    (container,) = template["spec"]["template"]["spec"]["containers"]
    quoted = shlex.quote(value).replace("$", "$$")
    assert (
        f"exec bert-jax {shlex.join(COMMAND)} /shared/runs/one {quoted}) &"
        in container["command"][2]
    )


# Several processes here.


def python(code, *arguments):
    return launch.Process([sys.executable, "-c", code, *arguments], {}, "[x] ")


def test_local_processes_know_each_other_and_say_who_speaks(capsys, monkeypatch):
    code = (
        "import os, sys; e = os.environ; "
        "print(e['BERT_JAX_PROCESS'], e['BERT_JAX_PROCESSES'], e['BERT_JAX_COORDINATOR'], e['XLA_FLAGS']);"
        "sys.stderr.write('no newline')"
    )
    monkeypatch.setattr(launch, "python_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setenv("XLA_FLAGS", "--old")
    assert launch.run(plan("local", processes=3, devices=4)) == 0
    told = capsys.readouterr()
    lines = sorted(told.out.split("\n")[:-1])
    coordinator = lines[0].split()[3]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)
    flag = "--old --xla_force_host_platform_device_count=4"
    assert lines == [f"[{i}] {i} 3 {coordinator} {flag}" for i in range(3)]
    assert sorted(told.err.split("\n"))[1:] == [f"[{i}] no newline" for i in range(3)]


SLEEPS = "import signal, sys, time\n" + (
    "def save(*_):\n    print('saved', flush=True); sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)\n"
    "print('up', flush=True)\ntime.sleep(600)"
)
DEAF = "import signal, time\n" + (
    "signal.signal(signal.SIGTERM, lambda *_: None)\nprint('up', flush=True)\ntime.sleep(600)"
)


def ends(status, when):
    """Ends with a status once a file is there."""
    return python(
        "import os, sys, time\n"
        f"while not os.path.exists({str(when)!r}): time.sleep(0.01)\n"
        f"os.kill(os.getpid(), 9) if {status} == 137 else sys.exit({status})"
    )


@pytest.mark.parametrize(
    ("statuses", "counts"),
    [([0, 0], 0), ([75, 75], 75), ([137], 137), ([1], 1), ([75], 75), ([2], 2)],
)
def test_the_status_that_counts(statuses, counts, tmp_path):
    (tmp_path / "go").touch()
    others = [python(SLEEPS)] if len(statuses) == 1 else []
    processes = [ends(status, tmp_path / "go") for status in statuses]
    assert launch.run_processes([*processes, *others]) == (counts, False)


def test_2_wins_though_it_came_second(tmp_path):
    late = python("import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(2))\n"
                  f"open({str(tmp_path / 'go')!r}, 'w').close()\ntime.sleep(600)")  # fmt: skip
    assert launch.run_processes([late, ends(75, tmp_path / "go")]) == (2, False)


def test_who_does_not_stop_is_killed(tmp_path):
    deaf = python(
        DEAF.replace("print('up'", f"open({str(tmp_path / 'go')!r}, 'w').close(); print('up'")
    )
    status, _ = launch.run_processes([deaf, ends(1, tmp_path / "go")], stop_seconds=0.2)
    assert status == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_all_and_end_it(number, capsys):
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
    assert launch.run(two) == 75  # and not once more
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
def test_local_runs_again(statuses, restarts, last, runs, bench, monkeypatch):
    file = bench.bin.parent / "statuses"
    file.write_text("\n".join(statuses.split()) + "\n")
    body = f"s=$(head -n 1 {file}); sed -i 1d {file}; [ $s != 137 ] || kill -9 $$; exit $s"
    program = bench.program("bert-jax", body)
    monkeypatch.setattr(launch, "python_command", lambda: [str(program)])
    assert launch.run(plan("local", processes=1, restarts=restarts)) == last
    assert len(bench.calls()) == runs


def test_the_command_itself_in_two_processes(tmp_path):
    """`bert-jax launch` and, below it, `python -m bert_jax` for real; a mistake ends both."""
    command = [*COMMAND, tmp_path / "run", "--rows=/one/too/many"]
    started = [sys.executable, "-m", "bert_jax", "launch", "--on", "local", "--", *command]
    done = subprocess.run(started, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert re.search(r"^\[[01]\] bert-jax pretrain: ", done.stderr, re.MULTILINE), done.stderr


# Mistakes.


@pytest.mark.parametrize(
    ("on", "program", "advice"),
    [
        ("tpu-vm", "gcloud", "Google Cloud CLI"),
        ("gke", "xpk", "pip install xpk"),
        ("slurm", "sbatch", "login node"),
        ("sky", "sky", "skypilot"),
    ],
)
def test_a_missing_program(on, program, advice, tmp_path, monkeypatch, capsys):
    for name in ("bash", "git"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", "--on", on, *flags(on), "--", *COMMAND, "/s/r"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"bert-jax launch: {program} is not on the PATH: ")
    assert advice in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "local"], "after --"),
        (["--on", "local", "--"], "after --"),
        (["--on", "local", "--", "report", "x"], "give pretrain or finetune"),
        (["--on", "local", "--", *COMMAND, "/w", "--config.stepz=1"], "steps"),
        (["--on", "local", "--zone", "a", "--", *COMMAND, "/w"], "--zone is not an option of --on local"),
        (["--on", "sky", "--", *COMMAND, "/w"], "--on sky needs --accelerator"),
        (["--on", "slurm", "--nodes", "0", "--", *COMMAND, "/w"], "--nodes 0: it must be 1 or more"),
        (["--on", "slurm", "--name", "No", "--", *COMMAND, "/w"], "--name No"),
        (["--on", "slurm", "--", *COMMAND, "gs://b/runs"], "gs://b/runs: only local paths are supported"),
        (["--on", "local", "--", *COMMAND, "/w", "--rows=s3://b/rows"], "s3://b/rows: "),
        (["--on", "slurm", "--extra=a\nb", "--", *COMMAND, "/w"], "--extra 'a\\nb' contains a line break"),
        (["--on", "slurm", "--extra=--comment=hf_" + "a" * 34, "--", *COMMAND, "/w"], "--extra looks like a credential"),
        (["--on", "tpu-vm", *flags("tpu-vm"), "--", *COMMAND, "runs/one"], "mount a bucket"),
        (["--on", "gke", *flags("gke"), "--", *COMMAND, os.path.expanduser("~/runs")], "mount a bucket"),
        (["--on", "sky", *flags("sky"), "--", *COMMAND, "/tmp/run"], "mount a bucket"),
        (["--on", "sky", *flags("sky"), "--bucket=gs://bkt", "--", *COMMAND, "/data"], "mounted at /bucket"),
        (["--on", "sky", *flags("sky"), "--bucket=s3://bkt", "--", *COMMAND, "/bucket"], "it must be gs://NAME"),
        (["--on", "tpu-vm", "--zone=z", "--accelerator=v99-8", "--", *COMMAND, "/w"], "v5litepod-N"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, message, capsys):
    assert cli.main(["launch", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told, told
    assert told.count("\n") == 1
    assert "hf_" not in told


def test_a_config_that_workers_lack(tmp_path, capsys):
    shutil.copy(ROOT / "configs" / "pretrain.py", tmp_path / "mine.py")
    command = ["pretrain", "--config", f"{tmp_path / 'mine.py'}:mini,128", "--workdir", "/w"]
    assert cli.main(["launch", "--on", "gke", *flags("gke"), "--", *command]) == 2
    assert "workers run in a copy of" in capsys.readouterr().err
    assert cli.main(["launch", "--on", "slurm", "--dry-run", "--", *command]) == 0


def test_an_unknown_engine(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["launch", "--on", "cloud", "--", *COMMAND, "/w"])
    assert stop.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_a_submission_that_is_refused(bench):
    bench.program("sbatch", "echo no such partition >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch .* exited with status 1$"):
        launch.run(plan("slurm"))


@ON
def test_names(on):
    assert launch.job_name("Run_7 (b)") == "run-7-b"
    assert launch.job_name("128") == "bert-128"
    assert launch.job_name("日") == "bert"
    text = launch.script(plan(on, name="fine-1"))
    assert on == "local" or "fine-1" in text


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_are_executable_and_bash(path):
    assert path.stat().st_mode & stat.S_IXUSR
    assert subprocess.run(["bash", "-n", path]).returncode == 0
