"""Object storage on real GCS and S3 servers, with outages, transient errors and damaged objects."""

import asyncio
import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import gcsfs.retry
import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import cli, storage, train
from bert_jax.config.schema import CheckpointConfig
from bert_jax.data import loader
from bert_jax.data.mixture import Mixture
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import read_manifest
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import Unavailable, UserError
from bert_jax.runs import checkpoint, manifests, workdir
from bert_jax.runtime.signals import Interrupted
from bert_jax.storage import copies
from bert_jax.storage import lease as lease_lib
from tests.helpers import processes
from tests.helpers.objects import serve
from tests.helpers.runs import (
    ONE_DEVICE,
    assert_same_run,
    command,
    refused,
    start_processes,
    train_here,
    wait_for_all,
)

STEPS = ("steps=16", "checkpoint.every_steps=4", "evaluate_every_steps=8", "log_every_steps=4")
SHORT = ("steps=6", "checkpoint.every_steps=2", "evaluate_every_steps=6", "log_every_steps=2")
COMPILED = {}  # the training steps of runs with SHORT
on_both = pytest.mark.parametrize("server", ["gs", "s3"], indirect=True)


@pytest.fixture(scope="module", params=["gs"])
def server(request, tmp_path_factory):
    """Start a storage server for this process and its children."""
    folder = tmp_path_factory.mktemp(request.param)
    with (
        serve(request.param, str(folder / "objects")) as started,
        pytest.MonkeyPatch.context() as m,
    ):
        # gcsfs waits seconds before it tries again, as does no test that counts them.
        short = types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 50))
        m.setattr(gcsfs.retry, "asyncio", short)
        started.environment["BERT_JAX_STORAGE_CACHE"] = str(folder / "cache")
        for name, value in started.environment.items():
            m.setenv(name, value)
        yield started
    assert not {"gs:", "s3:"} & {*os.listdir()}  # no URL was used as a local path


@pytest.fixture
def url(server, request):
    """Return the URL of an empty folder on the server."""
    server.proxy.failures, server.proxy.fail_every, server.proxy.is_down = [], 0, False
    server.proxy.silent_every = 0
    return f"{server.url}/{request.node.originalname}"


@pytest.fixture(scope="module")
def remote_rows(server, rows):
    """Return the URL of rows of T=32 on the server."""
    put(rows(), f"{server.url}/rows")
    return f"{server.url}/rows"


@pytest.fixture(scope="module")
def uninterrupted(rows, tmp_path_factory):
    """Return the folder of the same run on the local disk, without interruptions."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = processes.run(command(folder, [rows()], *STEPS), env=ONE_DEVICE)
    assert done.returncode == 0, done.stderr
    return folder


def put(folder, url):
    """Upload a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    storage.upload(paths, [f"{url}/{path.relative_to(folder)}" for path in paths])


def start(server, url, rows, *options, **environment):
    argv = [*command(url, [rows], *STEPS, "checkpoint.keep_last=9"), *options]
    return processes.Process(argv, env={**ONE_DEVICE, **server.environment, **environment})


def finish(process):
    """Wait for a run to end successfully and return standard error."""
    _, result = process.communicate(timeout=240)
    assert process.returncode == 0, result
    return result


def wait_for_objects(url, count, process):
    """Wait until the checkpoints of a run have this many objects."""
    while len(storage.listing(f"{url}/checkpoints")) < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


# --- Objects --------------------------------------------------------------------------------------


@on_both
def test_object_operations(url):
    assert storage.create(f"{url}/a", b"first")
    assert not storage.create(f"{url}/a", b"second")
    assert storage.read(f"{url}/a") == b"first"
    storage.write(f"{url}/folder/b", b"0123456789")
    stats = storage.listing(url)
    assert {name: stat.size for name, stat in stats.items()} == {"a": 5, "folder/b": 10}
    crc, md5 = f"{google_crc32c.value(b'first'):08x}", hashlib.md5(b"first").hexdigest()
    assert stats["a"].checksum == (f"crc32c:{crc}" if url.startswith("gs") else f"md5:{md5}")
    assert storage.read_ranges([(f"{url}/folder/b", 2, 5), (f"{url}/a", 0, 2)]) == [b"234", b"fi"]
    storage.move(f"{url}/folder", f"{url}/moved")
    storage.delete([f"{url}/a", f"{url}/none"])
    assert list(storage.listing(url)) == ["moved/b"]
    assert storage.listing(f"{url}/none") == {}
    with pytest.raises(UserError, match="does not exist"):
        storage.read(f"{url}/none")


@on_both
def test_transient_server_errors_are_retried(server, url):
    for failures in ([503, 429], [500]):
        server.proxy.failures = list(failures)
        storage.write(f"{url}/a", b"content")
        server.proxy.failures = list(failures)
        assert storage.read(f"{url}/a") == b"content"
        assert server.proxy.failures == []


@on_both
@pytest.mark.parametrize(("status", "says"), [(403, "denied"), (400, "refuses")])
def test_refused_requests_are_not_reported_as_an_outage(server, url, monkeypatch, status, says):
    for call in (storage.read, storage.listing):
        monkeypatch.setattr(server.proxy, "failures", 4 * [status])
        with pytest.raises(UserError, match=f"{url}: .*{says}") as error:
            call(url)
        assert not isinstance(error.value, Unavailable)


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        # gcsfs raises these instead of its errors of HTTP.
        (ValueError("Bad Request: b/o\ninvalid bucket"), "refuses"),
        (ValueError("Bucket is requester pays."), "refuses"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        # TensorStore's
        (ValueError("PERMISSION_DENIED: Error reading [source locations='a.cc:1']"), "denied"),
        (ValueError("NOT_FOUND: Error reading [source locations='a.cc:1']"), "refuses"),
        (ValueError("UNAVAILABLE: Error reading [source locations='a.cc:1']"), "does not answer"),
    ],
)
def test_permanent_errors_are_not_reported_as_an_outage(raised, says):
    with (
        pytest.raises(UserError, match=f"gs://b/x: .*{says}") as error,
        storage.errors_of("cannot read gs://b/x"),
    ):
        raise raised
    assert isinstance(error.value, Unavailable) is (says == "does not answer")


@on_both
def test_a_silent_server_is_reported_once_and_given_up(server, url, monkeypatch, capfd):
    monkeypatch.setattr(storage.objects, "_DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr(storage.objects, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(storage.objects, "_last_quiet", [-100.0])
    server.proxy.silent_every = 1
    for call in (storage.listing, storage.read, lambda url: storage.write(url, b"")):
        with pytest.raises(Unavailable, match=url):
            call(f"{url}/a")
    assert capfd.readouterr().err.count(url) == 1


def test_a_repeated_part_of_an_upload_is_refused(server, url, tmp_path):
    """The server has it, but its answer was lost."""
    content = os.urandom(6 << 20)
    (tmp_path / "large").write_bytes(content)
    server.proxy.failures = [0, 503, 410]  # to the session, the part, and the part again
    storage.upload([tmp_path / "large"], [f"{url}/large"])
    assert storage.read(f"{url}/large") == content


# --- The lease ------------------------------------------------------------------------------------


def other_machine(monkeypatch):
    """Make the next lease belong to a process on another machine."""
    here = lease_lib.this_process()
    monkeypatch.setattr(lease_lib, "this_process", lambda: {**here, "host": "other", "pid": 1})


def test_lease_has_one_owner(url, monkeypatch):
    monkeypatch.setattr(lease_lib, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(lease_lib, "EXPIRY_SECONDS", 0.5)
    with monkeypatch.context() as patched:
        other_machine(patched)
        owner = storage.Lease(url).__enter__()
    with pytest.raises(UserError, match="pid 1 on other"):
        storage.Lease(url).__enter__()
    assert owner.is_ours()
    owner._released.set()  # stops its thread, like a suspended process
    with storage.Lease(url) as second:  # the first has expired
        assert second.is_ours()
        assert not owner.is_ours()
        owner._released.clear()
        owner.renew()
        owner.__exit__()  # too late: the expired owner changes nothing
        assert second.is_ours()
    assert storage.listing(url) == {}


def test_lease_survives_a_lost_answer(url, monkeypatch):
    """The request that creates it is retried, and the second one is rejected."""
    create = storage.objects.create
    monkeypatch.setattr(storage.objects, "create", lambda *args: create(*args) and create(*args))
    with storage.Lease(url) as lease:
        assert lease.is_ours()
    assert storage.listing(url) == {}


def test_suspended_owner_does_not_renew_a_later_lease(url, monkeypatch):
    """Another process took over, finished and released the lease, whose numbers begin at 1 again."""
    with monkeypatch.context() as patched:
        other_machine(patched)
        first = storage.Lease(url).__enter__()
    storage.delete([f"{url}/lease/000001"])
    with storage.Lease(url) as later:
        assert list(storage.listing(url)) == ["lease/000001"]
        first.renew()
        assert later.is_ours()
        assert not first.is_ours()
        first.__exit__()
        assert later.is_ours()
    assert storage.listing(url) == {}


def test_output_is_not_completed_after_another_process_takes_over(url, monkeypatch):
    upload = storage.objects.upload

    def take_over(paths, urls):
        upload(paths, urls)
        storage.write(f"{url}/lease/000009", b"{}")

    def write():
        with storage.output(url) as folder:
            folder.mkdir(parents=True)
            for name in ("config.json", "model"):
                (folder / name).write_text(name)

    monkeypatch.setattr(storage.objects, "upload", take_over)
    with pytest.raises(UserError, match=f"{url} was taken over"):
        write()
    assert "config.json" not in storage.listing(url)


def test_dead_local_process_loses_its_lease(url):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = {**lease_lib.this_process(), "pid": process.pid, "token": "its", "beats": 3}
    storage.write(f"{url}/lease/000007", json.dumps(dead).encode())
    began = time.monotonic()
    with storage.Lease(url):
        assert list(storage.listing(url)) == ["lease/000008"]
    assert time.monotonic() - began < lease_lib.EXPIRY_SECONDS / 2


@pytest.mark.parametrize("is_known", [True, False])
def test_copies_are_deleted_only_where_their_process_is_known_to_be_dead(
    is_known, tmp_path, monkeypatch
):
    """The pid of a process in another container, or on another host, may be of no process here."""
    monkeypatch.setenv("BERT_JAX_STORAGE_CACHE", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    here = lease_lib.this_process()

    def folder_of(**changes):
        with monkeypatch.context() as patched:
            patched.setattr(copies, "this_process", lambda: here | changes)
            path = copies.process_folder.__wrapped__()
        path.mkdir()
        return path

    own, dead = folder_of(), folder_of(pid=process.pid)
    others = {folder_of(pid=process.pid, **change) for change in (
        {"namespace": "pid:[1]"}, {"host": "other"}, {"namespace": ""}
    )}  # fmt: skip
    copies.process_folder.__wrapped__() if is_known else folder_of(namespace="", pid=1)
    assert dead.exists() is not is_known
    assert own.exists()
    assert all(path.exists() for path in others)


def test_suspended_owner_leaves_the_mirror_of_the_next_one(server, url, monkeypatch):
    """Both run on this machine; the first stops when it wakes up."""
    monkeypatch.setattr(lease_lib, "EXPIRY_SECONDS", 0.5)
    first = processes.Process(
        [sys.executable, "-c", f"""if True:
            import signal
            from bert_jax import storage
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            with storage.mirrored({url!r}):
                print("ready", flush=True)
                signal.sigwait([signal.SIGUSR1])"""],
        env=server.environment,
    )  # fmt: skip
    assert first.stdout.readline() == "ready\n"
    first.send_signal(signal.SIGSTOP)
    with storage.mirrored(url) as folder:
        first.send_signal(signal.SIGUSR1)
        first.send_signal(signal.SIGCONT)
        _, error = first.communicate()
        assert f"{url} was taken over" in error
        (folder / "metrics.jsonl").write_text("all of it")
    assert storage.read(f"{url}/metrics.jsonl") == b"all of it"


def test_suspended_owner_does_not_write_to_sealed_steps(url, monkeypatch):
    """It is suspended while it saves a step, which the next owner saves and seals."""
    tree, create = {"a": jnp.arange(50.0)}, checkpoint._SealedRemote.create
    other = copies.copy_of(url, "other") / "checkpoints"

    def take_over():
        storage.write(f"{url}/lease/000009", b"{}")
        second = checkpoint.Checkpoints(other, CheckpointConfig(), owner="second")
        second.save(1, tree, tree)
        second.close()

    async def suspended(self):
        path = await create(self)
        monkeypatch.setattr(checkpoint._SealedRemote, "create", create)
        thread = threading.Thread(target=take_over)
        thread.start()
        thread.join()
        return path

    def save():
        with storage.mirrored(url) as folder:
            owner = storage.push(folder)
            first = checkpoint.Checkpoints(folder / "checkpoints", CheckpointConfig(), owner=owner)
            monkeypatch.setattr(checkpoint._SealedRemote, "create", suspended)
            first.save(1, tree, tree)
            first.close()

    with pytest.raises(UserError, match=f"{url} was taken over"):
        save()
    left = checkpoint.Checkpoints(other, CheckpointConfig(), read_only=True)
    assert left.steps() == [1]
    assert manifests.find_damage(left.folder_of(1)) is None


# --- Files and folders ----------------------------------------------------------------------------


def test_outputs_are_written_atomically(server, url):
    def fail():
        with storage.output(f"{url}/out") as folder:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert storage.listing(url) == {}
    server.proxy.requests.clear()
    with storage.output(f"{url}/out", new=True) as folder:
        folder.mkdir(parents=True)
        for name in ("config.json", "model", "vocab.txt", "z", ".partial"):
            (folder / name).write_text(name)
    uploads = [
        path + str(body)  # gcsfs sends the names of small objects in the body
        for method, path, body in server.proxy.requests
        if method in ("POST", "PUT")
    ]
    names = ("config.json", "model", "vocab.txt", "z")
    order = [name for text in uploads for name in names if f"out/{name}" in text]
    assert sorted(order[:2]) == ["model", "z"]
    assert order[2:] == ["vocab.txt", "config.json"]  # what makes the folder complete
    assert list(storage.listing(f"{url}/out")) == sorted(names)
    with (
        pytest.raises(UserError, match=f"{url}/out exists"),
        storage.output(f"{url}/out", new=True),
    ):
        pass
    with storage.output(f"{url}/file.txt") as path:
        path.write_text("text")
    assert storage.read(f"{url}/file.txt") == b"text"
    copy = storage.local(f"{url}/out")
    assert sorted(p.name for p in copy.iterdir()) == sorted(names)
    assert storage.remote(copy / "model") == f"{url}/out/model"
    assert str(UserError(f"cannot read {copy}/model")) == f"cannot read {url}/out/model"


def test_interrupted_upload_of_a_new_folder_is_repeated(url, monkeypatch):
    """The files that describe the folders in it are uploaded last."""
    upload = storage.objects.upload

    def write():
        with storage.output(url, new=True) as folder:
            for name in ("step_1/config.json", "step_1/model", "step_2/config.json"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(name)

    def interrupted(paths, urls):
        if "config.json" in urls[0]:
            raise KeyboardInterrupt
        upload(paths, urls)

    monkeypatch.setattr(storage.objects, "upload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write()
    monkeypatch.setattr(storage.objects, "upload", upload)
    assert "step_1/model" in storage.listing(url)
    write()
    assert list(storage.listing(url)) == [
        "step_1/config.json",
        "step_1/model",
        "step_2/config.json",
    ]
    with pytest.raises(UserError, match=f"{url} exists"):
        write()


def test_manifest_of_deleted_rows_is_forgotten(url):
    def fail():
        with storage.output(url, resumable=True) as folder:
            assert (folder / "manifest.json").exists()
            (folder / "finished").write_text("work")
            raise ZeroDivisionError

    storage.write(f"{url}/manifest.json", b"{}")
    with pytest.raises(ZeroDivisionError):
        fail()
    storage.delete([f"{url}/manifest.json"])
    with storage.output(url, resumable=True) as folder:
        assert [path.name for path in folder.iterdir()] == ["finished"]
    assert list(storage.listing(url)) == ["finished"]


def test_rows_replace_rows_only(url):
    """A bucket may hold anything in addition to the rows."""
    line = "The river runs past the mill and it turns the wheel of it."
    content = f"{line}\nOne.\n\n{line}".encode() + b"\xff\nTwo.\n"
    storage.write(f"{url}/text/a.txt", content)
    others = ("runs/base/checkpoints/3/params/x", "rows128/manifest.json", "a.model")
    old = ("train-00000-of-00002.arrayrecord", "tokenizer.json", "merges.txt")
    for name in (*others, *old):
        storage.write(f"{url}/{name}", b"{}")
    vocabulary = Vocabulary((*SPECIAL, "one"), True)
    manifest = prepare([f"google:{url}/text"], vocabulary, url, workers=1)
    shards = [shard.name for shard in manifest.train.shards + manifest.heldout.shards]
    new = {*shards, "manifest.json", "vocab.txt", "vocab.json"}
    assert {*storage.listing(url)} == {"text/a.txt", *others, *new}
    where = [warning.split(" ")[0] for warning in manifest.warnings]
    assert where[:2] == [f"{url}/text/a.txt:4", f"{url}/text/a.txt:"]


def test_local_copy_of_a_run_has_no_checkpoints(url):
    """Each seed of a fine-tuning has a run in a folder of its own."""
    for name in ("", "seed_0/", "seed_10/"):
        for file in ("metrics.jsonl", "checkpoints/3/x", "profile/x"):
            storage.write(f"{url}/seeds/{name}{file}", b"")
    copy = storage.local(f"{url}/seeds")
    assert {path.name for path in copy.rglob("*") if path.is_file()} == {"metrics.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["pretrain", "--workdir", "az://x/y"], "az://x/y"),
        (["pretrain", "--workdir=x", "--config.phases[0].rows=az://x"], "az://x"),
        (["evaluate", "--workdir", "gs://"], "a bucket is missing"),
        # URLs may be texts.
        (["fill-mask", "--init=/none", "https://www.[MASK].org/"], "/none"),
        (["attention", "--init=none", "--text=https://x", "--out=x"], "--out x"),
        (["launch", "--on=sky", "--image=docker://x"], "give pretrain"),
    ],
)
def test_unsupported_urls_are_rejected(capsys, tmp_path, monkeypatch, arguments, key):
    monkeypatch.chdir(tmp_path)
    assert key in refused(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


# --- Rows -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the empty cache of this process."""
    monkeypatch.setenv("BERT_JAX_STORAGE_CACHE", str(tmp_path))
    return tmp_path


def test_remote_rows_equal_local_rows(remote_rows, rows, cache):
    far, near = loader.RowDataset(remote_rows, "train"), loader.RowDataset(rows(), "train")
    assert not far.is_local
    order = np.random.default_rng(0).permutation(len(near))
    for name, values in far.read(order).items():
        np.testing.assert_array_equal(values, near.read(order)[name])
    order = np.arange(700)
    mixed = [Mixture([x, near], [1.0, 2.0], 0.0, [0, 0], True) for x in (far, near)]
    for name, values in mixed[0].read(order).items():
        np.testing.assert_array_equal(values, mixed[1].read(order)[name])
    assert far.is_local
    assert len(list(cache.rglob("*.arrayrecord"))) == len(near._shards)


@on_both
def test_altered_rows_are_detected(url, rows, cache):
    put(rows(), url)
    manifest = read_manifest(rows())
    name = manifest.train.shards[0].name
    content = bytearray(storage.read(f"{url}/{name}"))
    content[content.index(loader.RowDataset(rows(), "train")._records([3])[0]) + 5] ^= 1
    storage.write(f"{url}/{name}", bytes(content))
    far = loader.RowDataset(url, "train")
    for _ in range(2):
        with pytest.raises(UserError, match=f"{url}/{name} fails its checksum"):
            far.read([0])
    skipped = []
    far = loader.RowDataset(url, "train", skipped.append)
    for _ in range(2):
        assert far.read([2, 3])["length"].any(1).tolist() == [True, False]
    altered, damaged = skipped
    assert f"{url}/{name} fails its checksum" in altered
    assert f"record 3 of the shard {url}/{name} is damaged" in damaged
    assert list(cache.rglob("*.arrayrecord")) == []
    storage.write(f"{url}/{name}", bytes(content[:-100]))
    with pytest.raises(UserError, match="truncated or altered"):
        loader.RowDataset(url, "train")
    storage.delete([f"{url}/{name}"])
    with pytest.raises(UserError, match=f"{url}/{name} is missing"):
        loader.RowDataset(url, "train")


@pytest.mark.parametrize("place", ["record", "index"])
def test_damaged_copies_of_rows_are_replaced(remote_rows, rows, cache, place):
    near = loader.RowDataset(rows(), "train")
    loader.RowDataset(remote_rows, "train", pytest.fail).verify()
    path = next(cache.rglob(near._shards[0].name))
    content = bytearray(path.read_bytes())
    if place == "record":
        content[content.index(near._records([3])[0]) + 5] ^= 1
    else:
        content[-(64 << 10) : -(64 << 10) + 64] = bytes(64)
    path.chmod(0o644)
    path.write_bytes(content)
    far = loader.RowDataset(remote_rows, "train", pytest.fail).read([2, 3])
    np.testing.assert_array_equal(far["tokens"], near.read([2, 3])["tokens"])
    assert path.read_bytes() != content


def test_rows_in_use_stay_in_the_bounded_cache(remote_rows, cache, monkeypatch):
    opened = loader.RowDataset(remote_rows, "train")
    opened.verify()  # as before the first step of a run
    size = sum(shard.bytes for shard in opened._shards)
    monkeypatch.setenv("BERT_JAX_STORAGE_CACHE_GB", str(1.5 * size / 1e9))
    other, old = cache / "rows" / "other", cache / "rows" / "old"
    other.mkdir()
    old.mkdir()
    (old / "shard").write_bytes(bytes(size))
    os.utime(old, (1, 1))
    assert not storage.make_room(other, size)
    assert not old.exists()
    assert len(list(cache.rglob("*.arrayrecord"))) == len(opened._shards)


def test_unreadable_rows_are_not_skipped_as_damaged(url, rows, cache, monkeypatch):
    put(rows(), url)
    opened = loader.RowDataset(url, "train", pytest.fail)
    with monkeypatch.context() as context:
        context.setenv("BERT_JAX_STORAGE_CACHE_GB", "0")
        with pytest.raises(UserError, match="BERT_JAX_STORAGE_CACHE_GB"):
            opened.read([0])
    storage.delete([f"{url}/{shard.name}" for shard in opened._shards])
    with pytest.raises(UserError, match="does not exist"):
        opened.read([0])


# --- Runs -----------------------------------------------------------------------------------------


@on_both
def test_damaged_checkpoints_are_set_aside(url, capfd):
    """Checkpoints have a truncated object, a missing object, or no manifest (never committed)."""
    storage.write(f"{url}/starts.jsonl", b"{}")
    storage.write(f"{url}/config.json", b'{"run": "a", "vocabulary": {"sha256": "b"}}')
    checkpoints = f"{url}/checkpoints"
    with storage.mirrored(url) as folder:
        config, identity = CheckpointConfig(keep_last=9), workdir.read_identity(folder)
        written = checkpoint.Checkpoints(folder / "checkpoints", config, identity=identity)
        checkpoint.move_damaged(folder)  # a run that is killed before it saves starts again
        for step in (1, 2, 3, 4):
            written.save(step, {"a": jnp.arange(50.0) + step}, {"b": jnp.ones(3)})
        written.close()
        assert not [s for s in written.steps() if manifests.find_damage(written.folder_of(s))]
        stats = storage.listing(checkpoints)

        def largest(step):
            """Return the URL of the largest object of a step's parameters."""
            names = [name for name in stats if name.startswith(f"{step}/params/")]
            return f"{checkpoints}/{max(names, key=lambda name: stats[name].size)}"

        storage.write(largest(4), storage.read(largest(4))[:-10])
        storage.delete([largest(3), f"{checkpoints}/2/manifest.json"])
        checkpoint.move_damaged(folder)
        output = capfd.readouterr().err
        assert re.search(r"step 4 is damaged \(params/\S+ has", output)
        assert re.search(r"step 3 is damaged \(params/\S+ is missing", output)
        assert any(name.startswith("4/") for name in storage.listing(f"{url}/damaged"))
        left = checkpoint.Checkpoints(folder / "checkpoints", config, identity=identity)
        assert left.steps() == [1]
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        restored, _ = left.restore(1, checkpoint.abstract({"a": jnp.ones(50)}, device))
        np.testing.assert_array_equal(restored["a"], np.arange(50.0) + 1)
        left.close()
        storage.delete([f"{checkpoints}/{name}" for name in storage.listing(checkpoints)])
        with pytest.raises(UserError, match="lost its checkpoints"):
            checkpoint.move_damaged(folder)


@pytest.mark.slow
def test_killed_run_resumes_bitwise_identical(server, url, remote_rows):
    """A kill leaves what a stopped process has written. The run ends where there are no copies."""
    process = start(server, url, remote_rows)
    while not re.search(
        "(^| )4-[^ ]+/manifest.json", " ".join(storage.listing(f"{url}/checkpoints"))
    ):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.stop()
    killed = f"{url}_killed"
    for name in storage.listing(url):
        storage.write(f"{killed}/{name}", storage.read(f"{url}/{name}"))
    process.send_signal(signal.SIGCONT)
    finish(process)
    elsewhere = server.environment["BERT_JAX_STORAGE_CACHE"] + "2"
    result = finish(start(server, killed, remote_rows, "--cache", elsewhere))
    assert re.search("resuming at step [1-9][0-9]* of 16", result)
    assert list(pathlib.Path(elsewhere).rglob("*.arrayrecord"))
    assert len(storage.read(f"{killed}/starts.jsonl").splitlines()) == 2
    assert_same_run(killed, url)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["is_down", "silent_every"])
def test_run_resumes_after_a_server_outage(server, url, remote_rows, uninterrupted, fault):
    process = start(server, url, remote_rows)
    wait_for_objects(url, 20, process)
    setattr(server.proxy, fault, 1)
    _, result = process.communicate(timeout=300)
    setattr(server.proxy, fault, 0)
    assert process.returncode == cli.EXIT_INTERRUPTED, result
    assert "Traceback" not in result
    assert "the storage does not answer" in result
    finish(start(server, url, remote_rows))
    assert_same_run(url, uninterrupted)


def test_second_writer_is_rejected(url, remote_rows, monkeypatch):
    monkeypatch.setattr(lease_lib, "HEARTBEAT_SECONDS", 0.3)
    with storage.Lease(url), pytest.raises(UserError, match=f"{url} is in use .*{os.getpid()}"):
        train_here(url, lambda: remote_rows, *SHORT)


@pytest.fixture(scope="module")
def local_run(rows, tmp_path_factory):
    """Return the folder of a run of 6 steps in this process."""
    folder = tmp_path_factory.mktemp("local") / "run"
    train_here(folder, rows, *SHORT, compiled=COMPILED)
    return folder


def test_run_survives_transient_server_errors_and_a_preemption(
    server, url, remote_rows, local_run, monkeypatch
):
    changes, steps, shard_batch = (*SHORT, "checkpoint.keep_every_steps=6"), [], train.shard_batch

    def signal_at_step_3(batch, mesh):
        steps.append(len(steps) + 1)
        if steps[-1] == 3:
            signal.raise_signal(signal.SIGTERM)
        return shard_batch(batch, mesh)

    def run():
        train_here(url, lambda: remote_rows, *changes, compiled=COMPILED, save_on_signal=True)

    server.proxy.fail_every = 50
    with monkeypatch.context() as patched:
        patched.setattr(train, "shard_batch", signal_at_step_3)
        with pytest.raises(Interrupted, match=f"saved step 3 of 6 in {url}"):
            run()
    run()
    server.proxy.fail_every = 0
    assert_same_run(url, local_run)
    names = storage.listing(f"{url}/checkpoints")
    kept = {int(name.split("-")[0]) for name in names if name.endswith("/manifest.json")}
    assert kept == {0, 4, 6}
    assert checkpoint.load_model(url, "4")[3] == 4


@pytest.mark.slow
def test_two_processes_match_one_process(server, url, remote_rows, local_run):
    argv = command(url, [remote_rows], *SHORT)
    codes, errors = wait_for_all(start_processes(argv, 2, **server.environment))
    assert codes == [0, 0], errors
    (_, _, params, step), (_, _, params_of_one, step_of_one) = (
        checkpoint.load_model(folder, "latest") for folder in (url, local_run)
    )
    assert step == step_of_one
    for a, b in zip(*map(jax.tree.leaves, (params, params_of_one)), strict=True):
        # Summation order differs with two processes, and Adam's denominator is near 0 at first.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert json.loads(storage.read(f"{url}/starts.jsonl"))["processes"] == 2
