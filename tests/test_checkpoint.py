"""Damaged, truncated and slow checkpoints, and full disks.

Damaged checkpoints are never used, and intact ones are never lost.
"""

import errno
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import cli
from bert_jax import train as loop
from bert_jax.config.schema import CheckpointConfig
from bert_jax.errors import UserError
from bert_jax.runs import checkpoint, manifests, workdir
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.storage import files
from bert_jax.tools.report import curves
from tests.helpers import processes
from tests.helpers.checkpoints import WORDS, error_of, random_params, small_config, write_run
from tests.helpers.runs import (
    ONE_DEVICE,
    VOCABULARY,
    assert_same_run,
    command,
    refused,
    small_run,
)

CHANGES = (
    *("steps=6", "evaluate_every_steps=2", "log_every_steps=2", "evaluate_rows=8"),
    *("checkpoint.every_steps=2", "checkpoint.keep_last=9"),
)


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def delete(path):
    path.unlink()


DAMAGES = (truncate, flip, zero, delete)
# Every kind of file in a checkpoint, as globs that match at least one file each.
KINDS = (
    *("_CHECKPOINT_METADATA", "manifest.json", "metrics/metrics", "params/_METADATA"),
    *("params/d/*", "params/ocdbt.process_0/d/*", "training/ocdbt.process_0/d/*"),
    "training/ocdbt.process_0/manifest.ocdbt",
)


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory):
    """A finished run of 6 steps, and a function that starts or resumes it in a given folder."""
    settings, compiled = small_run(rows, *CHANGES), {}

    def go_on(folder):
        loop.train(*settings, folder, compiled=compiled)
        return folder

    return go_on(tmp_path_factory.mktemp("run") / "whole"), go_on


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the finished run, to be damaged."""
    return pathlib.Path(shutil.copytree(run[0], tmp_path / "copy"))


def step(folder, number=6):
    return folder / "checkpoints" / str(number)


def steps(folder):
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())


def assert_whole_run(folder, run):
    """Assert that a run ended as `run` did and that all its checkpoints are intact."""
    assert_same_run(folder, run)
    kept = steps(folder / "checkpoints")
    assert kept == steps(run / "checkpoints") == [2, 4, 6]
    for number in kept:
        assert manifests.find_damage(step(folder, number)) is None
    assert checkpoint.load_model(folder)[3] == checkpoint.load_model(run)[3]


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("_CHECKPOINT_METADATA", truncate),
        ("manifest.json", flip),
        ("metrics/metrics", zero),
        ("params/ocdbt.process_0/d/*", delete),
    ],
)
def test_run_recovers_bitwise_from_a_damaged_checkpoint(run, copy, capfd, kind, harm):
    whole, go_on = run
    path = max(step(copy).glob(kind), key=lambda path: path.stat().st_size)
    name = path.relative_to(step(copy)).as_posix()
    harm(path)
    go_on(copy)
    output = capfd.readouterr().err.splitlines()
    assert f"step 6 is damaged ({name} " in output[0]
    assert output[0].endswith(f"moved to {copy}/damaged/6; resuming from step 4")
    assert "resuming at step 4 of 6" in output
    assert_whole_run(copy, whole)


def test_damage_to_any_file_is_detected(copy):
    folder = step(copy)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for kind in KINDS:
        assert set(folder.glob(kind)) & set(paths), kind
    assert len(paths) > len(KINDS)
    for path, harm in itertools.product(paths, DAMAGES):
        content, name = path.read_bytes(), path.relative_to(folder).as_posix()
        harm(path)
        assert manifests.find_damage(folder).startswith(f"{name} "), harm
        item = name.split("/")[0]
        for items in ([checkpoint.PARAMS], [checkpoint.METRICS], []):
            concerns = "/" not in name or item in items
            assert bool(manifests.find_damage(folder, items)) == concerns
        path.write_bytes(content)
    (folder / "params" / "new").touch()
    assert manifests.find_damage(folder) == "params/new is not in manifest.json"


def test_several_damaged_checkpoints_and_repeated_damage(run, copy, capfd):
    whole, go_on = run
    flip(step(copy, 6) / "manifest.json")
    delete(step(copy, 4) / "_CHECKPOINT_METADATA")
    go_on(copy)
    output = capfd.readouterr().err.splitlines()
    assert [line.split(" is ")[0].split()[-1] for line in output[:2]] == ["6", "4"]
    assert all(line.endswith("resuming from step 2") for line in output[:2])
    zero(step(copy, 6) / "manifest.json")
    zero(step(copy, 2) / "metrics" / "metrics")  # an older one, whose metrics help select the best
    go_on(copy)
    output = capfd.readouterr().err.splitlines()
    assert output[0].endswith(f"moved to {copy}/damaged/6.2; resuming from step 4")
    assert output[1].endswith(f"moved to {copy}/damaged/2; resuming from step 4")
    assert sorted(p.name for p in (copy / "damaged").iterdir()) == ["2", "4", "6", "6.2"]
    assert_same_run(copy, whole)


def resign(folder, **changes):
    """Change a manifest and update its checksum."""
    path = folder / manifests.MANIFEST
    content = json.loads(path.read_text()) | changes
    del content["sha256"]
    path.write_text(json.dumps({"sha256": manifests._digest(content), **content}))


def test_checkpoint_of_another_step_or_run_is_rejected(run, copy, capfd):
    whole, go_on = run
    step(copy).rename(step(copy, 8))
    shutil.copytree(step(copy, 4), step(copy, 6))
    go_on(copy)
    output = capfd.readouterr().err.splitlines()
    assert "step 8 is damaged (it is a copy of step 6)" in output[0]
    assert "step 6 is damaged (it is a copy of step 4)" in output[1]
    assert output[0].endswith("resuming from step 4")
    assert_whole_run(copy, whole)
    for key, text in (("run", "another run"), ("vocabulary", "another vocabulary")):
        manifest = json.loads((step(copy) / manifests.MANIFEST).read_text())
        assert manifest[key] == workdir.read_identity(copy)[key] != ""
        resign(step(copy), **{key: "0123456789abcdef"})
        with pytest.raises(UserError, match=text):
            checkpoint.load_model(copy, "6")
        go_on(copy)
        assert text in capfd.readouterr().err
        assert_whole_run(copy, whole)
    files = json.loads((step(copy) / manifests.MANIFEST).read_text())["files"]
    files["params/_METADATA"][1] = "0" * 64  # as version 0.1
    resign(step(copy), files=files)
    with pytest.raises(UserError, match="another version"):
        checkpoint.load_model(copy, "6")
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        go_on(copy)
    assert steps(copy / "checkpoints") == [2, 4, 6]


def test_run_identity_ignores_the_checkpoint_interval(run, rows, tmp_path):
    """Runs with the same identity are bitwise equal, so checkpoints may be copied between them."""
    config = workdir.read_config(run[0])
    identities = []
    for i, (seed, every) in enumerate([(0, 2), (0, 3), (1, 2)]):
        config.seed, config.checkpoint.every_steps = seed, every
        folder = tmp_path / str(i)
        folder.mkdir()
        workdir.write_or_check_config(
            folder, config, workdir.read_data(run[0]), {}, False, VOCABULARY
        )
        identities.append(workdir.read_identity(folder)["run"])
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize("harm", ["line", "value", "file"])
def test_damaged_metrics_are_reported_and_readable_lines_kept(run, copy, capfd, harm):
    go_on = run[1]
    shutil.rmtree(step(copy))
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = {
        "line": [lines[0], b"\xff" + lines[1][1:], *lines[2:]],
        "value": [lines[0], lines[1].replace(b'"split": "', b'"split": "un'), *lines[2:]],
        "file": [],
    }[harm]
    path.write_bytes(b"".join(damaged))
    if harm == "file":
        path.unlink()
    go_on(copy)
    (output,) = [line for line in capfd.readouterr().err.splitlines() if "were lost" in line]
    assert f"{path}: lines up to step 4" in output
    later = [line for line in lines if json.loads(line)["step"] > 4]
    kept = {"line": [lines[0], *lines[2 : -len(later)]], "value": damaged[: -len(later)]}
    assert path.read_bytes() == b"".join(kept.get(harm, damaged) + later)
    if harm != "file":
        assert (copy / "damaged" / "metrics.jsonl").read_bytes() == b"".join(damaged)
    go_on(copy)  # the new checkpoint matches the repaired metrics
    assert "were lost" not in capfd.readouterr().err


def test_metrics_that_were_deleted_cannot_be_synced(tmp_path):
    """A checkpoint would count on them."""
    path = tmp_path / "metrics.jsonl"
    file = workdir.JsonlFile(path, 0)
    file.sync()
    path.unlink()
    with pytest.raises(UserError, match=f"cannot write {path}"):
        file.sync()


NONSENSE = (b"", b"\xff\x00", b"[]", b"[" * 9999, None)
RESUMED = (b"[]", None)
SMALL_FILES = (
    "config.json", "metrics.jsonl", "speed.jsonl", "starts.jsonl", "vocab.txt",
    "tensorboard", "checkpoints", "damaged", "checkpoints/4/manifest.json",
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL_FILES)
def test_garbage_in_a_small_file_gives_a_one_line_error(run, tmp_path, name):
    """None stands for a folder. Operations that do not need the file still succeed."""
    for i, content in enumerate(NONSENSE):
        copy = tmp_path / str(i)
        shutil.copytree(run[0], copy)
        shutil.rmtree(step(copy))
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.mkdir() if content is None else path.write_bytes(content)
        assert fails_in_one_line(checkpoint.load_model, copy), content
        assert fails_in_one_line(workdir.read_provenance, copy, 4), content
        assert fails_in_one_line(curves.read, [str(copy)]), content
        if content in RESUMED:
            assert fails_in_one_line(run[1], copy), content


def fails_in_one_line(use, *given):
    """Return whether a call succeeds or raises a `UserError` of one line."""
    try:
        use(*given)
    except UserError as error:
        return "\n" not in str(error)
    return True


def test_run_without_checkpoints_never_restarts_silently(run, copy, tmp_path):
    whole, go_on = run

    def assert_refused(*texts):
        with pytest.raises(UserError) as caught:
            go_on(copy)
        assert [text for text in texts if text not in str(caught.value)] == []

    lines = (copy / "metrics.jsonl").read_bytes()
    for number in (2, 4, 6):
        flip(step(copy, number) / "_CHECKPOINT_METADATA")
    for _ in range(2):
        assert_refused(*(f"step {number}: _CHECKPOINT_METADATA" for number in (2, 4, 6)))
    assert steps(copy / "checkpoints") == [2, 4, 6]
    for number in (2, 4, 6):
        shutil.rmtree(step(copy, number))
    assert_refused("has lost its checkpoints")
    shutil.rmtree(copy / "checkpoints")
    assert_refused("has lost its checkpoints")
    (copy / "checkpoints").mkdir()
    (copy / "damaged").mkdir()
    assert_refused("has lost its checkpoints")
    assert (copy / "metrics.jsonl").read_bytes() == lines
    # The state that a kill before the first save leaves behind.
    (copy / "damaged").rmdir()
    go_on(copy)
    assert_whole_run(copy, whole)


def test_readers_reject_damage_without_falling_back(run, copy, tmp_path, capsys):
    data = max(step(copy).glob("params/ocdbt.process_0/d/*"), key=lambda p: p.stat().st_size)
    flip(data)
    flip(step(copy) / "training" / "_METADATA")
    out = tmp_path / "out"
    for verb in (
        ("evaluate", "--workdir", copy, "--checkpoint", "6"),
        ("fill-mask", "--init", copy, "--checkpoint", "latest", "The king [MASK]."),
        ("export", "--workdir", copy, "--out", out, "--checkpoint", "latest"),
    ):
        result = refused(capsys, *verb)
        assert f"step 6 in {copy}/checkpoints is damaged" in result
        assert str(data.relative_to(step(copy))) in result
        assert "another step (2, 4)" in result
    assert not out.exists()
    assert checkpoint.load_model(copy, "4")[3] == 4
    shutil.rmtree(step(copy, 2))
    shutil.rmtree(step(copy, 4))
    assert "no other step" in refused(capsys, *verb)
    flip(data)  # undo the damage
    assert checkpoint.load_model(copy, "latest")[3] == 6, "what is not read does not matter"
    truncate(step(copy) / "metrics" / "metrics")
    assert checkpoint.load_model(copy, "latest")[3] == 6
    assert "metrics/metrics has" in refused(capsys, "evaluate", "--workdir", copy)


PARAMS = {"a": {"kernel": jnp.arange(24.0).reshape(4, 6)}, "b": jnp.ones(3)}


def params_of(number):
    return jax.tree.map(lambda x: x + number, PARAMS)


def save(checkpoints, number, **options):
    training = {"step": jnp.int32(number), "moments": PARAMS}
    checkpoints.save(number, params_of(number), training, **options)


@pytest.mark.parametrize("highest", [False, True])
def test_newest_of_tied_checkpoints_is_kept_and_best(tmp_path, highest):
    config = CheckpointConfig(keep_last=2)
    checkpoints = Checkpoints(tmp_path, config, best_by="f1", highest=highest)
    for number, f1 in enumerate((0.5, 0.5, 0.5, 0.7 - highest, 0.7 - highest), start=1):
        save(checkpoints, number, heldout={"f1": f1})
        checkpoints.wait()
        assert checkpoints.best_step() == min(number, 3)
    checkpoints.close()
    assert steps(tmp_path) == [3, 4, 5]


def test_checkpoints_of_earlier_phases_are_not_ranked(tmp_path):
    """Losses on short rows, here before step 3, can be lower than those of a better model."""
    options = {"best_by": "loss", "since": 3}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1), **options)
    best = []
    for number, loss in enumerate((0.2, 0.1, 0.7, 0.6, 0.8), start=1):
        save(checkpoints, number, heldout={"loss": loss})
        checkpoints.wait()
        best.append(checkpoints.best_step())
    checkpoints.close()
    assert best == [1, 2, 3, 4, 4]
    assert steps(tmp_path) == [4, 5]
    # Saved when the run had one phase, before --resume=force added another.
    old = Checkpoints(tmp_path / "old", CheckpointConfig(keep_last=9), best_by="loss")
    for number, loss in ((2, 0.1), (4, 0.6), (5, 0.8)):
        save(old, number, heldout={"loss": loss})
    old.close()
    reader = Checkpoints(tmp_path / "old", CheckpointConfig(), **options, read_only=True)
    assert reader.best_step() == 4


def test_removed_checkpoints_stay_intact_until_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    for number in (1, 2, 3):
        save(checkpoints, number)
        checkpoints.wait()
        assert steps(tmp_path) == [number]
        for gone in steps(tmp_path / "removed") if number > 1 else []:
            assert gone == number - 1
            assert manifests.find_damage(tmp_path / "removed" / str(gone)) is None
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "saved"]
    manifests.seal(tmp_path / "3", {"step": 3})  # sealing is idempotent
    assert manifests.find_damage(tmp_path / "3") is None


def test_failed_save_keeps_other_checkpoints(tmp_path, monkeypatch):
    config = CheckpointConfig(keep_last=1)
    checkpoints = Checkpoints(tmp_path, config)
    save(checkpoints, 1)
    checkpoints.wait()

    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setattr(manifests, "seal", mock.Mock(side_effect=full))
        save(checkpoints, 2)
        with pytest.raises(UserError, match="the disk is full"):
            checkpoints.wait()
    again = Checkpoints(tmp_path, config)
    assert again.steps() == [1]
    assert manifests.find_damage(tmp_path / "1") is None
    save(again, 2)
    again.close()
    assert steps(tmp_path) == [2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "saved"]


def test_saves_slower_than_their_interval_do_not_overlap(tmp_path, monkeypatch):
    busy, seal = threading.Lock(), manifests.seal

    def slow(folder, facts):
        assert busy.acquire(blocking=False), "two saves at a time"
        time.sleep(0.2)
        seal(folder, facts)
        busy.release()

    monkeypatch.setattr(manifests, "seal", slow)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=9))
    for number in range(1, 6):
        save(checkpoints, number)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    shapes = checkpoint.abstract(PARAMS, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for number in checkpoints.steps():
        assert manifests.find_damage(tmp_path / str(number)) is None
        result, _ = checkpoints.restore(number, shapes)
        jax.tree.map(np.testing.assert_array_equal, result, params_of(number))
    checkpoints.close()


def test_io_error_is_damage_but_permission_error_is_not(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    checkpoints.close()
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(files, "crc32c", mock.Mock(side_effect=error))
    assert "cannot be read" in manifests.find_damage(tmp_path / "1")
    error.errno = errno.EACCES
    with pytest.raises(UserError, match="permission denied"):
        manifests.find_damage(tmp_path / "1")


def test_lock_is_released_when_its_owner_is_killed(tmp_path):
    code = (
        "import sys, time\n"
        "from bert_jax.storage import files\n"
        f"with files.lock_folder({str(tmp_path)!r}):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = processes.Process([sys.executable, "-c", code])
    assert owner.stdout.readline() == "held\n"
    for _ in range(2):  # twice: a failed attempt must not affect the owner's lock
        with pytest.raises(UserError, match=f"pid {owner.pid} on"), files.lock_folder(tmp_path):
            pass
    owner.kill()
    owner.wait()
    with files.lock_folder(tmp_path):
        assert f"pid {os.getpid()} on" in (tmp_path / files.LOCK).read_text()


@pytest.mark.slow
def test_every_command_reports_a_full_disk_in_one_line(run, rows, corpus, tmp_path):
    script = pathlib.Path(__file__).parent / "helpers" / "full_disk.py"
    (tmp_path / "disk").mkdir()
    given = [tmp_path / "disk", rows(), run[0], corpus]
    unshare = ("unshare", "--user", "--map-root-user", "--mount", sys.executable, script, *given)
    environment = {**ONE_DEVICE, "PYTHONPATH": str(script.parent.parent.parent)}
    done = subprocess.run(unshare, capture_output=True, text=True, check=False, env=environment)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no small file system can be made here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [(verb, text, left) for verb, _, status, text, left in attempts if status]
    assert {verb for verb, *_ in failed} >= {"vocab", "prepare", "pretrain", "export", "embed"}
    for verb, _, status, text, _ in attempts:
        assert status in (0, 2), text
        if status == 2:
            assert text.splitlines()[-1].startswith(f"bert-jax {verb}: "), text
            assert "disk is full" in text or "No space left" in text, text
    # Commands that cannot resume leave no files behind.
    assert not [left for verb, _, left in failed if left and verb in ("export", "embed", "report")]


@pytest.mark.nightly
def test_resume_after_full_disk_then_read_only_file_system(tmp_path, rows):
    mounted = tmp_path / "small"
    mounted.mkdir()
    folder = mounted / "run"
    changes = ("steps=40", "checkpoint.every_steps=2", "checkpoint.keep_last=99")
    # A file system in its own mount namespace, which disappears with the processes.
    script = (
        f'mount -t tmpfs -o size=3m tmpfs {mounted} || exit 99; "$@"; echo status $?; '
        f"cp -r {folder} {tmp_path}/full; mount -o remount,size=64m {mounted}; "
        f'"$@"; echo status $?; mount -o remount,ro {mounted}; "$@"; echo status $?; '
        f"cp -r {folder} {tmp_path}/done"
    )
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    try:
        done = subprocess.run(
            [*unshare, *command(folder, [rows()], *changes)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env=ONE_DEVICE,
        )
    except FileNotFoundError:
        pytest.skip("needs the command unshare to make a small file system")
    if done.returncode in (1, 99):
        pytest.skip(f"no small file system can be made here: {done.stderr.strip()[-200:]}")
    statuses = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert statuses == ["status 2", "status 0", "status 2"], done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    output = done.stderr.splitlines()
    # Reported by the next save, which names its step, or by the final wait on a busy machine. A save
    # that fails in the background is reported later than a log file that finds no space either.
    (full,) = [line for line in output if "the disk is full" in line]
    assert full.startswith(("bert-jax pretrain: cannot save ", "bert-jax pretrain: cannot write "))
    kept = steps(tmp_path / "full" / "checkpoints")
    assert kept
    for number in kept:
        assert manifests.find_damage(step(tmp_path / "full", number)) is None
    assert f"resuming at step {kept[-1]} of 40" in output
    assert steps(tmp_path / "done" / "checkpoints") == list(range(2, 41, 2))
    assert f"cannot use the folder {folder}: the file system is read-only" in output[-1]
    assert cli.main(["evaluate", "--workdir", str(tmp_path / "done"), "--json"]) == 0


def test_checkpoint_without_parameters_of_the_model_is_refused(tmp_path):
    """As after a config.json of another model was copied into the run."""
    config = small_config()
    params = random_params(config)
    pooler = params.pop("pooler")
    run = write_run(tmp_path / "run", config, params, WORDS)
    assert "pooler/" in error_of(checkpoint.load_model, run)
    params["pooler"] = jax.tree.map(lambda x: x[:3], pooler)
    run = write_run(tmp_path / "cut", config, params, WORDS)
    assert "has no pooler/" in error_of(checkpoint.load_model, run)
