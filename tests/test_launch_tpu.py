"""Launching on Cloud TPU VMs, simulated on this machine with a fake gcloud script."""

import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from bert_jax import cli
from bert_jax.errors import UserError
from bert_jax.tools.launch import plan as plan_lib
from tests.helpers.launch import (
    COMMAND,
    ROOT,
    enter_checkout,
    flags,
    make_checkout,
    make_programs,
    plan,
)

checkout = pytest.fixture(scope="module")(make_checkout)
in_checkout = pytest.fixture(autouse=True)(enter_checkout)
programs = pytest.fixture(make_programs)

GCLOUD = r"""
state=$FAKES/state
case "$*" in
  *"queued-resources describe"*)
    [ -s "$state" ] || { echo NOT_FOUND >&2; exit 1; }
    s=$(head -n 1 "$state")
    [ "$s" != GONE ] || { : > "$state"; echo NOT_FOUND >&2; exit 1; }
    [ "$s" != 503 ] || { sed -i 1d "$state"; exit 1; }
    echo "$s"
    [ "$(wc -l < "$state")" -le 1 ] || sed -i 1d "$state" ;;
  *"queued-resources create"*) [ ! -e "$FAKES/no-quota" ] || exit 1; cp "$FAKES/new" "$state" ;;
  *"queued-resources delete"*) : > "$state" ;;
  *"queued-resources scp"*)
    for part in "$@"; do case $part in /*) cp "$part" "$WORKER_HOME" ;; esac; done ;;
  *"queued-resources ssh"*)
    for part in "$@"; do case $part in --command=*) does=${part#--command=} ;; esac; done
    # As the real one does: split at spaces, joined again by ssh, read by the login shell.
    IFS=' ' read -r -a words <<< "$does"
    if [[ $does == *follow ]] && [ -s "$FAKES/lose" ]; then
      cp "$FAKES/lose" "$state"; : > "$FAKES/lose"; exit 255
    fi
    cd "$WORKER_HOME" && HOME=$WORKER_HOME bash -c "${words[*]}" ;;
esac
"""


@pytest.fixture
def cloud(programs, monkeypatch):
    """Return a function that launches on a fake slice of one worker; runs exit with `ends`."""
    folder = programs.bin.parent
    programs.program("gcloud", GCLOUD)
    programs.program("sudo", 'exec "$@"', records=False)
    # The fake service runs to completion before its log is followed.
    service = 'while [[ $1 == --* ]]; do shift; done; "$@" >> "$WORKER_HOME/job.log" 2>&1 || true'
    programs.program("systemd-run", service)
    programs.program("systemctl", '[ "$1" = show ] && echo 0 || exit 1', records=False)
    programs.program("python3", records=False)  # the real one makes an environment with uv
    programs.program("../home/uv/bin/pip", records=False)
    # A package that is not a path would come from the internet.
    package = 'for last; do :; done; [[ "$*" != *install* || $last == ./* ]]'
    programs.program("../home/uv/bin/uv", package, records=False)
    (programs.home / "venv" / "bin").mkdir(parents=True)
    ends = 's=$(head -n 1 "$FAKES/ends"); sed -i 1d "$FAKES/ends"; exit $s'
    run = programs.program("run", f'echo "commit $(git rev-parse HEAD)"; {ends}')
    shutil.move(run, programs.home / "venv" / "bin" / "bert-jax")
    monkeypatch.setenv("TPU_SLICE_POLL_SECONDS", "0")
    monkeypatch.setenv("BERT_JAX_LAUNCH_WAIT_SECONDS", "0")
    (folder / "new").write_text("WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")

    def launch(*ends, lose="", state="", **options):
        (folder / "ends").write_text("".join(f"{end}\n" for end in ends))
        (folder / "lose").write_text(lose)
        (folder / "state").write_text(state)
        status = plan_lib.run(plan("tpu-vm", **options))
        calls = programs.calls()
        verbs = [c[4] for c in calls if c[0] == "gcloud" and c[3] == "queued-resources"]
        runs = sum(c[0] == "run" for c in calls)
        return status, [verb for verb in verbs if verb in ("create", "delete")], runs, calls

    return launch


def test_tpu_slice_is_created_used_and_deleted(cloud, checkout, capfd):
    status, verbs, runs, calls = cloud(0, spot=True, project="p", extra=["--reserved"])
    assert (status, verbs, runs) == (0, ["create", "delete"], 1)
    create = next(call for call in calls if "create" in call)
    assert shlex.join(create[4:]) == (
        "create one --zone=us-west4-a --project=p --node-id=one --accelerator-type=v5litepod-16 "
        "--runtime-version=v2-alpha-tpuv5-lite --spot --reserved"
    )
    assert [call[1:] for call in calls if call[0] == "run"] == [[*COMMAND, "/shared/runs/one"]]
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True)
    assert f"commit {commit}" in capfd.readouterr().out  # from the worker's log


@pytest.mark.parametrize(
    ("ends", "options", "expected"),
    [
        ((75, 75, 0), {}, (0, ["create", "delete"], 3)),
        ((2,), {}, (2, ["create", "delete"], 1)),
        ((1,), {}, (70, ["create", "delete"], 1)),
        ((0,), {"keep": True}, (0, ["create"], 1)),
        ((0,), {"state": "ACTIVE\n"}, (0, ["delete"], 1)),
        # A query that fails does not mean that the slice is missing.
        ((0,), {"state": "PROVISIONING\n503\n503\nACTIVE\n"}, (0, ["delete"], 1)),
        ((0,), {"state": "SUSPENDING\nSUSPENDED\n"}, (0, ["delete", "create", "delete"], 1)),
        ((0,), {"state": "FAILED\n"}, (0, ["delete", "create", "delete"], 1)),
        # The slice is preempted during the run; then, only the connection is lost.
        ((75, 0), {"lose": "SUSPENDED\n"}, (0, ["create", "delete", "create", "delete"], 2)),
        ((75, 0), {"lose": "ACTIVE\n"}, (0, ["create", "delete"], 2)),
    ],
)
def test_tpu_slice_resumes_after_interruption_and_preemption(ends, options, expected, cloud):
    assert cloud(*ends, **options)[:3] == expected


def verbs(programs):
    return [call[4] for call in programs.calls("gcloud")]


def test_tpu_slice_creation_failure_is_reported(cloud, programs, capsys):
    (programs.bin.parent / "new").write_text("PROVISIONING\nFAILED\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"tpu_slice\.sh .* status 2"):
            cloud(0)
        (programs.bin.parent / "no-quota").touch()
    assert "delete" not in verbs(programs)
    assert capsys.readouterr().err.count("bert-jax launch stop one\n") == 2


@pytest.mark.parametrize("keep", [False, True])
def test_tpu_slice_is_deleted_after_a_failed_start(keep, cloud, programs, capsys):
    programs.program("../home/uv/bin/uv", "exit 1", records=False)
    with pytest.raises(UserError, match=r"ssh .* start .* exited with status 2$"):
        cloud(0, keep=keep)
    assert ("delete" in verbs(programs)) == (not keep)
    assert ("to delete them: bert-jax launch delete one" in capsys.readouterr().err) == keep


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_stops_the_wait_for_a_slice(number, programs):
    """No process goes on, which would create the slice again after it was deleted."""
    # Ends by itself, if nothing ends it.
    programs.program("gcloud", """
[ "$4" = describe ] || exit 0
echo >> "$FAKES/polls"
[ "$(wc -l < "$FAKES/polls")" -lt 500 ] && echo WAITING_FOR_RESOURCES || echo ACTIVE
""")  # fmt: skip
    code = "from bert_jax.tools.launch.plan import *; import sys; sys.exit(run(eval(sys.argv[1])))"
    with subprocess.Popen(
        [sys.executable, "-c", code, repr(plan("tpu-vm"))],
        env={**programs.environment, "TPU_SLICE_POLL_SECONDS": "0"},
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as launcher:
        while "WAITING_FOR_RESOURCES" not in launcher.stderr.readline():
            pass
        launcher.send_signal(number)
        rest = launcher.stderr.read()  # until no process is left that could write
    assert "ACTIVE" not in rest
    assert "delete" not in verbs(programs)
    if number != signal.SIGKILL:
        assert launcher.returncode == 75
        assert "to delete them: bert-jax launch stop one\n" in rest


def test_tpu_worker_does_not_restart_a_running_job(cloud, programs, capfd):
    cloud(0, keep=True)
    # It runs when it is started again, and has ended when it was followed.
    is_active = '[[ $(tr "\\0" " " < /proc/$PPID/cmdline) == *" start "* ]]'
    programs.program("systemctl", f'[ "$1" = show ] && echo 0 || {is_active}')
    assert cloud(keep=True, state="ACTIVE\n")[2] == 0
    assert "another command" not in capfd.readouterr().err
    with pytest.raises(UserError, match=r"exited with status 3$"):  # another command
        cloud(workdir="/shared/runs/other", name="one", state="ACTIVE\n")
    assert not {"run", "systemd-run"} & {call[0] for call in programs.calls()}
    output = capfd.readouterr().err
    assert "another command" in output
    assert "bert-jax launch stop one\n" in output


def test_tpu_vm_rejects_what_is_not_committed(checkout, capsys):
    """Workers receive the commit."""
    shutil.copy(checkout / "configs" / "pretrain.py", checkout / "configs" / "mine.py")
    assert (checkout / "configs" / "results.jsonl").exists()
    command = ["pretrain", "--config=configs/mine.py:mini,128", "--workdir=gs://b/r"]
    arguments = ["launch", "--dry-run", "--on", "tpu-vm", *flags("tpu-vm"), "--", *command]
    try:
        assert cli.main(arguments) == 2
        assert "--config configs/mine.py" in capsys.readouterr().err
        (checkout / "configs" / "pretrain.py").open("a").write("\n")
        with pytest.raises(UserError, match=r"configs/pretrain.py"):
            plan("tpu-vm")
        plan("sky")
        subprocess.run(["git", "-C", checkout, "checkout", "--quiet", "."], check=True)
        (checkout / "configs" / "results.jsonl").open("a").write("\n")  # of a sweep
        plan("tpu-vm")
    finally:
        (checkout / "configs" / "mine.py").unlink()
        subprocess.run(["git", "-C", checkout, "checkout", "--quiet", "."], check=True)


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("v5e:4x4,slices=2", "--node-count=2 --node-prefix=one --accelerator-type=v5litepod-16"),
        ("v4-8", "--node-id=one --accelerator-type=v4-8"),
        ("v5p:4x4x8", "--node-id=one --accelerator-type=v5p-256"),
        ("v4:2x4x8", "--node-id=one --type=v4 --topology=2x4x8"),
    ],
)
def test_tpu_accelerator_becomes_gcloud_arguments(accelerator, expected):
    made = plan("tpu-vm", accelerator=accelerator)
    create = made.setup[0]
    assert set(expected.split()) <= set(create)
    assert ("--node-id=one" in create) == ("slices" not in accelerator)
    for command in [*made.setup[2:], made.processes[0].command]:
        assert {"queued-resources", "--worker=all", "--node=all"} <= set(command)


def test_tpu_worker_copies_its_log(cloud, programs, monkeypatch):
    """The log is copied every COPY_SECONDS and at the end."""
    monkeypatch.setenv("COPY_SECONDS", "0.05")
    python = programs.program(
        "venv-python", 'cat "$2" >> "$FAKES/copied"; echo "$3" > "$FAKES/copied_to"'
    )
    shutil.move(python, programs.home / "venv" / "bin" / "python")
    cloud(0, workdir="gs://mine/runs/one")
    folder = programs.bin.parent
    assert "commit" in (folder / "copied").read_text()
    host = subprocess.check_output("hostname", text=True).strip()
    assert (folder / "copied_to").read_text() == f"gs://mine/runs/one/logs/{host}.log\n"
