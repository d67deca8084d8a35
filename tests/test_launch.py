"""Launching: commands of each engine, arguments that reach workers, restarts and errors."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
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
from bert_jax.tools.launch import jobs
from bert_jax.tools.launch import plan as plan_lib
from bert_jax.tools.launch import request as request_lib
from bert_jax.tools.launch.engines import base
from tests.helpers.launch import (
    COMMAND,
    FINETUNE,
    ON,
    PREPARE,
    ROOT,
    enter_checkout,
    flags,
    has_ended,
    make_checkout,
    make_programs,
    plan,
)

checkout = pytest.fixture(scope="module")(make_checkout)
in_checkout = pytest.fixture(autouse=True)(enter_checkout)
programs = pytest.fixture(make_programs)
SLURM = base.SCRIPTS / "slurm.sh"
# Scripts that save their state when they are stopped, and that wait for a file.
FOREVER = "while :; do sleep 0.02; done"
SAVES = f"trap 'echo saved; exit 75' TERM INT; echo up; {FOREVER}"
LATER = "until [ -e go ]; do sleep 0.02; done"

# Commands of each engine.


@pytest.mark.parametrize("on", ["gke", "slurm", "sky"])
def test_dry_run_output_equals_the_real_calls(on, programs, capsys, monkeypatch):
    for name in ("kubectl", "sbatch", "sky"):
        programs.program(name)
    secret = "hf_" + "x" * 30
    monkeypatch.setenv("HF_TOKEN", secret)
    extra = "--env=A=a b" if on == "gke" else "--extra=--queue=a b"
    arguments = ["launch", "--on", on, *flags(on), extra, "--", *COMMAND, "/s/it's"]
    assert cli.main(arguments) == 0
    real = programs.calls()
    assert len(real) == 1
    assert on == "gke" or "--queue=a b" in real[0]
    output = capsys.readouterr()
    assert cli.main([*arguments[:3], "--dry-run", *arguments[3:]]) == 0
    printed = capsys.readouterr().out
    assert programs.bash(printed).returncode == 0
    assert programs.calls() == real
    # Secrets of the environment do not appear in arguments, files or output.
    sent = [str(real), printed, output.out, output.err]
    files = list(pathlib.Path(os.environ["BERT_JAX_LAUNCH"]).rglob("*.yaml"))
    assert bool(files) == (on != "slurm")
    sent += [path.read_text() for path in files]
    assert not [text for text in sent if secret in text]


def test_slurm_arguments(programs):
    programs.program("sbatch")
    assert plan_lib.run(plan("slurm", restarts=3, extra=["--time=60"], env=["A=b c"])) == 0
    (call,) = programs.calls()
    script = call.index(str(SLURM))
    assert shlex.join(call[1:script]) == (
        "--job-name=one --output=one-%j.out --nodes=2 --ntasks-per-node=4 --cpus-per-task=4 "
        "--gpus-per-node=4 --time=60"
    )
    python = ["env", "A=b c", sys.executable, "-m", "bert_jax"]
    assert call[script + 1 :] == ["--restarts=3", "--", *python, *COMMAND, "/shared/runs/one"]


def test_slurm_containers_and_modules(programs):
    made = plan("slurm", image="i.sqsh", mount=["/shared", "/a:/b"], module=["cuda/13", "gcc"])
    programs.program("srun", "exit 0")
    programs.program("module")
    (submit,) = made.setup
    at = submit.index(str(SLURM))
    assert programs.bash(shlex.join(submit[at:])).returncode == 0
    *loads, run = programs.calls()
    assert loads == [["module", "load", "cuda/13"], ["module", "load", "gcc"]]
    options = ["--container-image=i.sqsh", "--container-mounts=/shared,/a:/b"]
    assert run[1:4] == ["--kill-on-bad-exit=1", *options]
    assert run[run.index("task") + 1 :] == ["bert-jax", *COMMAND, "/shared/runs/one"]


# Arguments that reach the workers.

VARIABLE = "A_VARIABLE"
HOSTILE = st.text(st.sampled_from("'\"\\$`!*?[]{}()<>|&;#~=%@^ -aé日🙂"), max_size=12)
PRINTABLE = st.one_of(HOSTILE, st.text(st.characters(exclude_categories="CZ"), max_size=12))
KNOWN = [
    'it\'s "$HOME" `id` $(id) $$ \\ %j !! ${a}',
    "$(HOME) $$(a) $$$(a)",
    *("--help", "", " ", "-", "@name {args} %USER% # -- ~ \\n", "*"),
]


@pytest.fixture
def worker(programs):
    """Return a function that runs an engine's plan and returns what `bert-jax` receives there."""
    programs.program("bert-jax", f'printenv {VARIABLE} > "$FAKES/variable"')
    (programs.home / "venv" / "bin").mkdir(parents=True)
    (programs.home / "venv" / "bin" / "bert-jax").symlink_to(programs.bin / "bert-jax")
    (programs.home / "bert_jax").mkdir()
    programs.program("srun", 'shift; exec "$@"', records=False)

    def arrives(on, plan):
        if on == "local":
            command, variables, _ = plan.processes[0]
        elif on == "slurm":
            (submit,) = plan.setup
            at = submit.index(str(SLURM))
            command, variables = ["bash", *submit[at:]], {}
        else:
            (text,) = plan.files.values()
            if on == "tpu-vm":
                command, variables = ["bash", "-c", text], {}
            elif on == "gke":
                command, variables = in_a_pod(yaml.safe_load(text))
            else:
                task = yaml.safe_load(text)
                command, variables = ["bash", "-c", task["run"]], task["envs"]
        names = [f"{name}={value}" for name, value in variables.items()]
        done = programs.bash(shlex.join(["env", *names, *command]))
        assert done.returncode == 0, done.stderr
        (call,) = programs.calls("bert-jax")
        variable = (programs.bin.parent / "variable").read_text()
        return call[1:], variable.removesuffix("\n")

    return arrives


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
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(values=KNOWN)
@given(values=st.lists(PRINTABLE, min_size=8, max_size=20))
def test_argument_values_reach_workers_unchanged(on, worker, programs, values, monkeypatch):
    assume(not any("://" in value for value in values))
    monkeypatch.setattr(base, "python_command", lambda: [str(programs.bin / "bert-jax")])
    arguments = [*values, *(f"--config.task.data={value}" for value in values)]
    options = {"processes": 1} if on == "local" else {}
    made = plan(on, *arguments, env=[f"{VARIABLE}={values[0]}"], **options)
    assert worker(on, made) == ([*COMMAND, "/shared/runs/one", *arguments], values[0])


@example(character="\n")
@example(character="\x85")
@given(character=st.characters(categories=["Cc", "Cf", "Zl", "Zp"]))
def test_unprintable_characters_are_rejected(character):
    for arguments, options in (([f"a{character}b"], {}), ([], {"extra": [character]})):
        with pytest.raises(UserError, match="unprintable") as refusal:
            plan("slurm", *arguments, **options)
        assert str(refusal.value).isprintable()


# Slurm's script with fake Slurm programs; launch/test_slurm.sh tests it on a real Slurm.


@pytest.mark.parametrize(
    ("tasks", "restarted", "ends", "requeues"),
    [
        ((0,), 0, 0, False),
        ((75, 75), 0, 75, True),
        ((75, 75), 3, 75, False),  # restart limit reached
        ((2, 75), 0, 2, False),  # the other task was stopped because of this failure
        ((137, 75), 0, 137, True),
    ],
)
def test_slurm_requeues_after_interruption(tasks, restarted, ends, requeues, programs, monkeypatch):
    each = 'export S=$s; "$@"; r=$?; ((r > worst)) && worst=$r'
    programs.program("srun", f"shift; worst=0; for s in $TASKS; do {each}; done; exit $worst")
    programs.program("scontrol")
    monkeypatch.setenv("TASKS", " ".join(map(str, tasks)))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarted))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(len(tasks)))
    script = ["bash", SLURM, "--restarts=3", "--", "bash", "-c"]
    expected = "auto" if len(tasks) > 1 else ""
    check = f'test "$BERT_JAX_DISTRIBUTED" = "{expected}" && exit "$S"'
    done = subprocess.run([*script, check], capture_output=True, text=True, timeout=60)
    assert done.returncode == ends, done.stderr
    assert programs.calls("scontrol") == ([["scontrol", "requeue", "17"]] if requeues else [])


def test_slurm_task_waits_for_the_final_save(programs):
    """SIGTERM also reaches the shell around the command, which must not exit before the command."""
    line = next(line for line in SLURM.read_text().split("\n") if line.startswith("task="))
    saves = f"trap 'sleep 0.3; exit 75' TERM; echo up; {FOREVER}"
    command = ["bash", "-c", f'{line}; exec bash -c "$task" task "$@"', "x", "bash", "-c", saves]
    task = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert task.stdout.readline() == b"up\n"
    os.killpg(task.pid, signal.SIGTERM)
    assert task.wait(timeout=60) == 75


# What SkyPilot and Kubernetes receive.


@pytest.mark.parametrize(
    "options",
    [
        {"accelerator": "H100:8", "nodes": 2, "env": ["A=b"]},
        {"accelerator": "tpu-v5e-16", "spot": True},
        {"accelerator": "", "image": "registry/image", "command": PREPARE},
    ],
)
def test_skypilot_task(options):
    (text,) = plan("sky", "--rows", "a: 'b' #", **options).files.values()
    task = yaml.safe_load(text)
    resources = task["resources"]
    assert task["num_nodes"] == options.get("nodes", 1)
    assert task.get("envs") == ({"A": "b"} if "env" in options else None)
    assert resources["use_spot"] == options.get("spot", False)
    # SkyPilot has gcloud's names.
    assert resources.get("accelerators", "") == options["accelerator"].replace("v5e", "v5litepod")
    assert resources["job_recovery"] == {"recover_on_exit_codes": [75]}
    software = {"runtime_version": "v2-alpha-tpuv5-lite"} if "spot" in options else None
    assert resources.get("accelerator_args") == software
    assert resources.get("image_id") == ("docker:registry/image" if "image" in options else None)
    assert ("setup" in task) == ("image" not in options)
    start = (
        "cd /opt/bert_jax && exec bert-jax " if "image" in options else "exec venv/bin/bert-jax "
    )
    assert task["run"].splitlines()[-1].startswith(start)


@pytest.mark.parametrize(
    ("accelerator", "kind", "shape", "slices", "machines", "chips"),
    [
        ("v5e:4x4,slices=2", "tpu-v5-lite-podslice", "4x4", 2, 4, 4),
        ("v5litepod-1", "tpu-v5-lite-podslice", "1x1", 1, 1, 1),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 1, 1, 4),
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
    assert names.get("BERT_JAX_JOIN_SECONDS") == ("3600" if accelerator else None)
    selector = {"cloud.google.com/gke-spot": "true"}
    if accelerator:
        selector["cloud.google.com/gke-tpu-accelerator"] = kind
        selector["cloud.google.com/gke-tpu-topology"] = shape
    assert pod["nodeSelector"] == selector
    assert pod.get("hostNetwork", False) == (slices > 1)
    assert container["resources"] == ({"limits": {"google.com/tpu": chips}} if chips else {})
    assert manifest["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "mine",
        "jobset.sigs.k8s.io/jobset-name": "one",
    }
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2]}}


# Jobs managed by name.


def test_detached_run_can_be_queried_and_stopped(programs, capsys, monkeypatch):
    """The run outlives the launch command, and its state and exit status are available by name."""
    program = programs.program("bert-jax", SAVES)
    code = (
        "from bert_jax.tools.launch.engines import base\n"
        f"base.python_command = lambda: [{str(program)!r}]\n"
        "import sys; from bert_jax import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    monkeypatch.setattr(jobs, "python_command", lambda: [sys.executable, "-c", code])
    log = pathlib.Path(os.environ["BERT_JAX_LAUNCH"]) / "one" / "log"
    command = ["--on", "local", "--processes", "1", "--detach", "--", *COMMAND, "/shared/runs/one"]

    def launch(*arguments):
        status = cli.main(["launch", *arguments])
        output = capsys.readouterr()
        return status, output.out + output.err

    assert launch(*command)[0] == 0
    deadline = time.monotonic() + 60
    while "[0] up" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "launcher running" in launch("status", "one")[1]
    status, error = launch(*command)
    assert (status, "launch status one" in error) == (2, True)  # it is running
    logs = threading.Thread(target=jobs.show_logs, args=("one",))
    logs.start()
    status, output = launch("stop", "one")
    logs.join()
    output += capsys.readouterr().out
    assert status == 0
    assert re.search(r"\[0\] up\n(.*\n)*\[0\] saved\n", output)
    assert "ended with status 75" in launch("status", "one")[1]
    assert "[0] saved" in launch("logs", "one")[1]
    jobs.start("local", "one", plan_lib.Plan())  # in this terminal: the log is not of this run
    assert launch("logs", "one")[0] == 2


def test_active_slurm_job_keeps_its_name(programs, capsys):
    """Otherwise `stop` would cancel the jobs of both folders."""
    programs.program("sbatch")
    programs.program("squeue", "cat $FAKES/queue")
    command = ["launch", "--on", "slurm", "--", *COMMAND]
    assert cli.main([*command, "/a/base"]) == 0
    (programs.bin.parent / "queue").write_text("17 base\n")
    programs.calls()
    assert cli.main([*command, "/a/base"]) == 0
    assert cli.main([*command, "/b/base"]) == 2
    assert "/a/base is queued or running" in capsys.readouterr().err
    assert len(programs.calls("sbatch")) == 1
    (programs.bin.parent / "queue").write_text("")
    assert cli.main([*command, "/b/base"]) == 0


@pytest.mark.parametrize("ssh_status", [0, 1])
def test_stop_runs_every_command_and_returns_the_worst_status(ssh_status, programs):
    """A slice that is not active, and refuses connections, is deleted."""
    programs.program("gcloud", f'[[ "$*" != *" ssh "* ]] || exit {ssh_status}')
    job = {"on": "tpu-vm", "began": "", "launcher": 0, "ended": 75, "stop": plan("tpu-vm").stop}
    folder = base.state_folder("one")
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    assert cli.main(["launch", "stop", "one"]) == ssh_status
    assert [call[4] for call in programs.calls()] == ["ssh", "delete"]


def test_detached_run_that_fails_at_once_is_reported(capsys, monkeypatch, tmp_path):
    kept = tmp_path / "kept"  # is not written through a link in place of the log
    kept.write_text("text")
    failing = ["bash", "-c", "echo no room; exit 3"]
    monkeypatch.setattr(jobs, "python_command", lambda: failing)
    log = base.state_folder("r") / "log"
    log.parent.mkdir(parents=True)
    log.symlink_to(kept)
    assert cli.main(["launch", "--on", "local", "--detach", "--", *COMMAND, "/s/r"]) == 2
    assert "the launcher failed: no room" in capsys.readouterr().err
    assert kept.read_text() == "text"


@pytest.fixture
def slurm_logs():
    """Write the log of job 1 and that of another job, whose name begins like it."""
    logs = [pathlib.Path.cwd() / name for name in ("one-1.out", "one-large-2.out")]
    logs[0].write_text("a\nthe last line\n")
    logs[1].write_text("no\n")
    yield
    for log in logs:
        log.unlink()


@pytest.mark.parametrize(
    ("queue", "accounts", "kind", "status", "text"),
    [
        ("PENDING Resources", "", "waiting", None, "PENDING Resources"),
        ("RUNNING None", "", "running", None, "the last line"),
        ("", "FAILED|2:0", "failed", 2, "FAILED"),
        ("", "FAILED|0:9", "failed", 137, "the last line"),
        (
            "",
            "NODE_FAIL|1:0",
            "failed",
            None,
            "NODE_FAIL",
        ),  # may pass, unlike the program's status 1
        ("", "RUNNING|0:0", "lost", None, "left the queue"),  # the accounting lags
        ("", "FAILED|1:0\nCOMPLETED|0:0", "done", 0, ""),
        ("", "CANCELLED by 1000|0:15", "stopped", None, "CANCELLED"),
        ("", "", "lost", None, "left the queue"),  # a cluster without accounting
        ("exit 1", "", "unknown", None, "squeue exited with status 1"),
    ],
)
def test_state_of_a_slurm_job(queue, accounts, kind, status, text, programs, slurm_logs):
    programs.program("sbatch")
    programs.program("squeue", queue if queue.startswith("exit") else f"echo '{queue}'")
    programs.program("sacct", f"echo '{accounts}'")
    assert cli.main(["launch", "--on", "slurm", "--", *COMMAND, "/shared/runs/one"]) == 0
    state = jobs.ask("one")
    assert (state.kind, state.status) == (kind, status)
    assert text in state.text
    assert "no" not in state.text.splitlines()


def test_logs_and_stop_of_a_slurm_job(programs, capsys, slurm_logs):
    for name in ("sbatch", "squeue", "scancel", "tail"):
        programs.program(name)
    command = ["launch", "--on", "slurm", "--", *COMMAND, "/shared/runs/one"]
    assert cli.main(command) == 0
    programs.calls()
    assert cli.main(["launch", "logs", "one"]) == 0
    assert [call[4:] for call in programs.calls()] == [[str(pathlib.Path.cwd() / "one-1.out")]]
    assert cli.main(["launch", "stop", "one"]) == 0
    assert programs.calls() == [["scancel", "--name=one"]]
    programs.program("sacct")
    assert jobs.ask("one").kind == "stopped"
    programs.program("squeue", "echo RUNNING")  # scancel has failed
    assert jobs.ask("one").kind == "running"
    assert cli.main([*command[:1], "--detach", *command[1:]]) == 2
    assert "--detach" in capsys.readouterr().err


# Several local processes.


def test_local_processes_share_a_coordinator_and_prefix_lines(capsys, monkeypatch):
    code = (
        "import os, sys; e = os.environ; "
        "names = 'PROCESS', 'PROCESSES', 'COORDINATOR';"
        "print(*(e['BERT_JAX_' + name] for name in names), e['XLA_FLAGS']);"
        "sys.stderr.write('no newline')"
    )
    monkeypatch.setattr(base, "python_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setenv("XLA_FLAGS", "--old")
    assert plan_lib.run(plan("local", processes=3, devices=4)) == 0
    output = capsys.readouterr()
    lines = sorted(output.out.split("\n")[:-1])
    coordinator = lines[0].split()[3]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)
    flag = "--old --xla_force_host_platform_device_count=4"
    assert lines == [f"[{i}] {i} 3 {coordinator} {flag}" for i in range(3)]
    assert sorted(output.err.split("\n"))[1:] == [f"[{i}] no newline" for i in range(3)]


def bash(script):
    return plan_lib.Process(["bash", "-c", script], {}, "[x] ")


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        (["exit 0", "exit 0"], 0),
        (["exit 75", "exit 75"], 75),
        (["kill -9 $$", SAVES], 137),
        (["exit 1", SAVES], 1),
        # Status 2 explains the others.
        ([f"{LATER}; exit 75", f"trap 'exit 2' TERM; touch go; {FOREVER}"], 2),
        # One that ignores SIGTERM is killed.
        ([f"{LATER}; exit 1", f"trap '' TERM; touch go; {FOREVER}"], 1),
    ],
)
def test_exit_status_of_several_processes(scripts, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    processes = [bash(script) for script in scripts]
    stop_seconds = 0.2 if "trap ''" in scripts[1] else 60.0
    assert plan_lib.run_processes(processes, [], stop_seconds) == status


def test_children_of_a_killed_process_are_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parent = bash("trap '' TERM; sleep 600 & echo $! > pid; touch go; wait")
    status = plan_lib.run_processes([bash(f"{LATER}; exit 1"), parent], [], stop_seconds=0.2)
    assert status == 1
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded_and_prevent_restarts(number, capsys):
    printed = []

    def output():
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    def send():
        while output().count("up") < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    two = plan_lib.Plan(processes=[bash(SAVES)] * 2, retry_statuses=frozenset({75}), restarts=5)
    assert plan_lib.run(two) == 75  # no restart
    sender.join()
    assert (output().count("up"), output().count("saved")) == (2, 2)


@pytest.mark.parametrize(
    ("statuses", "restarts", "last", "runs"),
    [
        ("75 75 0", 5, 0, 3),
        ("75 75 75", 1, 75, 2),
        ("2 0", 5, 2, 1),
        ("137 0", 1, 0, 2),
    ],
)
def test_local_run_restarts_after_interruption(
    statuses, restarts, last, runs, programs, monkeypatch
):
    file = programs.bin.parent / "statuses"
    file.write_text("\n".join(statuses.split()) + "\n")
    body = f"s=$(head -n 1 {file}); sed -i 1d {file}; [ $s != 137 ] || kill -9 $$; exit $s"
    program = programs.program("bert-jax", body)
    monkeypatch.setattr(base, "python_command", lambda: [str(program)])
    assert plan_lib.run(plan("local", processes=1, restarts=restarts)) == last
    assert len(programs.calls()) == runs


def test_launcher_gives_up_after_early_failures(capsys, monkeypatch):
    monkeypatch.setenv("BERT_JAX_LAUNCH_WAIT_SECONDS", "0.001")
    retried = {"retry_statuses": frozenset({137}), "restarts": 100, "dollars_per_hour": 19.2}
    with pytest.raises(UserError, match=r"^6 times .* status 137"):
        plan_lib.run(plan_lib.Plan(processes=[bash("kill -9 $$")], **retried))
    lines = [line for line in capsys.readouterr().err.splitlines() if "restarting" in line]
    waits = [float(re.search(r"in (\S+) s", line)[1]) for line in lines]
    assert waits == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert all("$19.20 an hour" in line for line in lines)


# User errors.


# Texts in braces stand for these arguments.
SHORT = {
    "pretrain": shlex.join(COMMAND),
    "mini": shlex.join(COMMAND[:3]),
    "prepare": shlex.join(PREPARE),
    "finetune": shlex.join(FINETUNE),
    "table": "finetune --config configs/table.py --init gs://b/base --workdir gs://b/run"
    " --config.task.train=gs://b/train.csv --config.task.dev=gs://b/dev.csv",
    "sweep": "sweep experiments/paper/table8",
    "gke": "--on gke --image=i",
    "sky": "--on sky " + shlex.join(flags("sky")),
    "tpu-vm": "--on tpu-vm --zone=z",
    "token": "hf_" + "a" * 34,
}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("--on local", "after --"),
        ("--on local -- report x", "pretrain, finetune, prepare or sweep"),
        ("-- {pretrain} /w", "--on ENGINE"),
        ("pause one", "status, logs, stop or delete"),
        ("stop one --keep", "no options"),
        ("logs none", "no job none"),
        ("--on local --env A -- {pretrain} /w", "--env A"),
        ("--on local --env=A={token} -- {pretrain} /w", "--env A looks like a credential"),
        (
            "--on slurm --extra=--comment={token} -- {pretrain} /w",
            "--extra looks like a credential",
        ),
        ("--on local --zone a -- {pretrain} /w", "--zone is not an option of --on local"),
        ("--on sky -- {pretrain} /w", "--on sky needs --accelerator"),
        ("--on slurm --nodes 0 -- {pretrain} /w", "--nodes 0: it must be 1 to"),
        ("--on slurm --name No -- {pretrain} /w", "--name No"),
        ("--on slurm -- {pretrain} az://b/runs", "az://b/runs"),
        # The disk of a worker is lost.
        ("{tpu-vm} --accelerator=v5e-16 -- {pretrain} runs/one", "runs/one would be lost"),
        ("{gke} --accelerator=v5e:4x4 -- {pretrain} /tmp/run", "/tmp/run would be lost"),
        ("{sky} -- {mini} --rows=configs --workdir=gs://b/r", "configs is on this machine"),
        ("{sky} -- {table} --config.task.labels=configs/glue.py", "configs/glue.py is on this"),
        (
            "--on sky -- prepare --vocab=gs://b/v books:configs/*.py@0.5 --out=gs://b/r",
            "configs/*.py is",
        ),
        # Accelerators
        ("{tpu-vm} --accelerator=v99-8 -- {pretrain} /w", "accelerator type"),
        ("{tpu-vm} --accelerator=tpu7x:2x2x1 -- {pretrain} /w", "choose from v4, v5e, v5p, v6e"),
        ("--on sky --accelerator=tpu-v6e:2x8 -- {pretrain} gs://b/r", "accelerator types"),
        ("--on sky --accelerator=tpu-v6e:4x4,slices=2 -- {pretrain} gs://b/r", "one slice"),
        ("{gke} -- {pretrain} gs://b/r", "--accelerator for pretrain"),
        # Verbs that run in one process
        ("{tpu-vm} --accelerator=v5e-16 -- {prepare} gs://b/rows", "prepare runs in one"),
        ("{gke} --accelerator=v5e:4x4 -- {prepare} gs://b/rows", "on CPUs; remove it"),
        ("--on slurm --nodes=2 -- {prepare} /s/rows", "prepare runs on one machine"),
        ("--on local --processes=2 -- {prepare} /s/rows", "prepare runs in one process"),
        ("{tpu-vm} --accelerator=v5e:4x4 -- {finetune} gs://b/r", "of at most 8 chips"),
        ("--on sky --accelerator=tpu-v5e-16 -- {finetune} gs://b/r", "finetune runs on one"),
        ("{sky} -- {sweep} --runs=/s", "`bert-jax sweep --on sky`"),
    ],
)
def test_user_errors_are_one_line(arguments, key, capsys):
    assert cli.main(["launch", *shlex.split(arguments.format_map(SHORT))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert key in line
    assert SHORT["token"] not in line


def test_package_without_a_checkout_is_sent_as_a_wheel(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(base, "CHECKOUT", tmp_path)
    command = "pretrain --config mini,128 --rows gs://b/rows --workdir gs://b/run".split()
    launch = ["launch", "--dry-run", "--on"]
    for on in ("tpu-vm", "sky"):
        assert cli.main([*launch, on, *flags(on), "--", *command]) == 0
        text = capsys.readouterr().out
        assert "bert_jax.tools.launch.wheel" in text.splitlines()[-5 if on == "tpu-vm" else -2]
        assert text.count(base.WHEEL) > 2
        assert "bundle" not in text
        command[2] = str(ROOT / "configs/pretrain.py:mini,128")
        assert cli.main([*launch, on, *flags(on), "--", *command]) == 2
        assert "--config " in capsys.readouterr().err
        command[2] = "mini,128"


def test_gke_rejects_a_config_outside_the_checkout(tmp_path, capsys):
    shutil.copy(ROOT / "configs" / "pretrain.py", tmp_path / "mine.py")
    command = ["pretrain", "--config", f"{tmp_path / 'mine.py'}:mini,128", "--workdir", "/w"]
    assert cli.main(["launch", "--on", "gke", *flags("gke"), "--", *command]) == 2
    assert "--config " in capsys.readouterr().err
    assert cli.main(["launch", "--on", "slurm", "--dry-run", "--", *command]) == 0


def test_job_names():
    assert request_lib.job_name("Run_7 (b)") == "run-7-b"
    assert request_lib.job_name("128") == "bert-128"
    assert request_lib.job_name("日") == "bert"


@pytest.mark.parametrize(
    "arguments",
    [
        "--on local -- {prepare} gs://b/rows",
        "--on sky -- {prepare} gs://b/rows",
        "--on slurm -- {sweep} --runs=/s",
        "--on slurm -- sweep --grid=batch_size=8,16 --runs=/s -- {mini} --rows=/r",
        "--on slurm --gpus=8 -- {finetune} gs://b/run",
        "--on sky --accelerator=H100:8 -- {finetune} gs://b/run",
    ],
)
def test_single_process_verbs_are_not_distributed(arguments, capsys):
    """If the variables of distributed runs were set, they would wait for other processes."""
    arguments = shlex.split(arguments.format_map(SHORT))
    assert cli.main(["launch", "--dry-run", *arguments]) == 0
    text = capsys.readouterr().out
    assert "BERT_JAX" not in text
    assert shlex.join(arguments[arguments.index("--") + 1 :]) in text
    assert "slurm" not in arguments or "--ntasks-per-node=1" in text
    assert "local" not in arguments or "[1]" not in text
