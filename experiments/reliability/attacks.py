"""Put real runs and commands into situations that they must survive.

    python experiments/reliability/attacks.py [--only NAME]

Creates its data as kills.py does. The result of each situation replaces its line in attacks.jsonl,
from which `report.py` writes README.md. Takes about an hour, needs Linux, root for mounts and host
names, and `pip install time-machine wandb mlflow-skinny`.
"""

import argparse
import contextlib
import gzip
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import kills

from bert_jax import storage

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
RESULTS = HERE / "attacks.jsonl"
SCHEMES = ("gs", "s3")


def started(
    command: list, host: str = "", program: tuple = ("-m", "bert_jax"), **environment: str
) -> subprocess.Popen:
    """Start a command with additional environment variables, and on Linux under a host name."""
    on_host = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"] if host else []
    return subprocess.Popen(
        [*on_host, sys.executable, *map(str, (*program, *command))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**kills.environment(), **environment},
    )


def devices(count: int) -> dict[str, str]:
    flags = f"{kills.environment()['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    return {"XLA_FLAGS": flags}


def wait_for(path: pathlib.Path, process: subprocess.Popen) -> None:
    """Wait until a file exists; fail if the process ends first."""
    while not path.exists():
        if process.poll() is not None:
            raise SystemExit(f"{path.name} was not written:\n{process.communicate()[0]}")
        time.sleep(0.01)


def starts(url: str) -> int:
    """Return the number of starts that a run on object storage has recorded."""
    path = f"{url}/starts.jsonl"
    return len(storage.read(path).splitlines()) if storage.is_file(path) else 0


def metrics_of(folder: pathlib.Path) -> dict:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads([line for line in lines if '"heldout"' in line][-1])


# --- Situations -----------------------------------------------------------------------------------


def two_devices_then_one(data: pathlib.Path, make: dict) -> dict:
    """A run on two devices is killed and resumed on one, three times."""
    worst = 0.0
    for i in range(3):
        out = data / f"devices_{i}"
        process = started(make["pretrain"](out), **devices(2))
        wait_for(out / "checkpoints" / str(9 * (3 + 4 * i)), process)
        process.kill()
        process.communicate()
        kills.call(*make["pretrain"](out))
        starts = [json.loads(line) for line in (out / "starts.jsonl").read_text().splitlines()]
        assert [start["devices"] for start in starts] == ["2 cpu", "1 cpu"], starts
        ours, theirs = metrics_of(out), metrics_of(data / "pretrain")
        assert ours["step"] == theirs["step"] == 240
        worst = max(worst, abs(ours["loss"] / theirs["loss"] - 1))
    assert worst < 1e-3
    return {"times": 3, "found": f"ended at step 240, its loss within {worst:.1e} of one device's"}


def another_number_of_workers(data: pathlib.Path, make: dict) -> dict:
    """`prepare` is killed with four workers and resumed with one, five times."""
    command, rng = make["prepare"], random.Random(0)
    for i in range(5):
        out = data / f"workers_{i}"
        due = kills.working(out, rng)
        process = started([*command(out), "--workers", 4])
        while process.poll() is None and not due():
            time.sleep(kills.POLL_SECONDS)
        process.kill()
        process.communicate()
        kills.call(*command(out), "--workers", 1)
        assert not kills.differences("prepare", out, data / "prepare")
    return {"times": 5, "found": "the same bytes as with one worker"}


def a_process_that_stands_still(data: pathlib.Path, make: dict) -> dict:
    """One of two processes of a run is stopped (SIGSTOP) for 90 seconds."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = data / "stopped"
    variables = {
        "BERT_JAX_COORDINATOR": f"127.0.0.1:{port}",
        "BERT_JAX_PROCESSES": "2",
        **devices(1),
    }

    def pair() -> list[subprocess.Popen]:
        return [
            started(make["pretrain"](out), **variables, BERT_JAX_PROCESS=str(i)) for i in range(2)
        ]

    first, second = pair()
    wait_for(out / "checkpoints" / "9", first)
    second.send_signal(signal.SIGSTOP)
    time.sleep(90)
    second.send_signal(signal.SIGCONT)
    text = first.communicate(timeout=600)[0]
    second.communicate(timeout=600)
    assert first.returncode == 75, text
    assert "process 1 of 2 has been silent for 60 s; run the same command to resume" in text, text
    again = pair()
    texts = [process.communicate(timeout=600)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], texts
    apart = abs(metrics_of(out)["loss"] / metrics_of(data / "pretrain")["loss"] - 1)
    assert metrics_of(out)["step"] == 240
    assert apart < 1e-3, apart
    return {
        "times": 1,
        "found": "after 60 s the other one ended with status 75 and one line; the same command "
        f"resumed and ended at step 240, its loss within {apart:.1e} of one process's",
    }


SWEEP = '''"""A sweep of one run."""
from bert_jax.tools.sweep import Point

def get_points(args):
    return [Point("run", {command!r})]
'''


def a_sweep_whose_run_is_killed(data: pathlib.Path, make: dict) -> dict:
    """The run that a sweep has started is killed; then the sweep is started again."""
    folder, runs = data / "sweep", data / "sweeps"
    folder.mkdir()
    command = tuple(str(part) for part in make["pretrain"]("OUT")[:-2])
    (folder / "sweep.py").write_text(SWEEP.format(command=command))
    arguments = ["sweep", folder, "--runs", runs, "--data", data]
    for _ in range(2):
        process = started(arguments)
        while not (checkpoints := list(runs.glob("*/out/checkpoints/[1-9]*"))):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        count = len(checkpoints)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"--workdir" in (line := file.read()) and str(runs).encode() in line:
                    os.kill(int(pid), signal.SIGKILL)
        text = process.communicate(timeout=600)[0]
        if process.returncode == 0:
            return {"times": 1, "found": "the sweep started the run again by itself; it resumed"}
    kills.call(*arguments)
    return {
        "times": 2,
        "found": f"the sweep printed {text.strip().splitlines()[-1]!r} and ended with status "
        f"{process.returncode}; started again, the run resumed ({count} checkpoints) and ended",
    }


def evaluation_beside_fine_tuning(data: pathlib.Path, make: dict) -> dict:
    """A workdir is evaluated in a loop while the run in it trains, saves and deletes."""
    out, times, early = data / "beside", 0, 0
    process = started(make["finetune"](out))
    while process.poll() is None:
        evaluation = started(["evaluate", "--workdir", out, "--json"])
        text = evaluation.communicate()[0]
        times += 1
        if evaluation.returncode:
            assert evaluation.returncode == 2, text
            assert "Traceback" not in text, text
            early += 1
    assert process.returncode == 0, process.communicate()[0]
    assert not kills.differences("finetune", out, data / "finetune")
    return {
        "times": times,
        "found": f"{times - early} evaluated, {early} ended with a one-line error, no such "
        "checkpoint; the run ended with the same bits",
    }


def predictions_on_a_full_disk(data: pathlib.Path, make: dict) -> dict:
    """`predict` writes to file systems of 4 to 64 kB."""
    disk = data / "disk"
    disk.mkdir()
    script = (
        f'for size in 4 8 16 32 64; do mount -t tmpfs -o size="$size"k tmpfs {disk}; "$@"; '
        f'echo "status $?"; ls -A {disk}/out 2>/dev/null | wc -l; umount {disk}; done'
    )
    predict = ["predict", "--workdir", data / "finetune", "--out", disk / "out", data / "dev.csv"]
    command = [sys.executable, "-m", "bert_jax", *map(str, predict)]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        env=kills.environment(),
        check=True,
    )
    statuses = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert "Traceback" not in done.stderr, done.stderr
    assert set(statuses) <= {"status 0", "status 2"}, statuses
    assert statuses[0] == "status 2", statuses
    failed = statuses.count("status 2")
    return {
        "times": 5,
        "found": f"{failed} ended with a one-line error, disk full; the others wrote their output",
    }


def memory_of(command: list) -> tuple[int, float, float]:
    """Run a command; return its status, peak memory in MB (with its workers) and minutes."""
    begin, pid = time.monotonic(), os.fork()
    if not pid:
        subprocess.run([sys.executable, "-m", "bert_jax", *map(str, command)],
                       env=kills.environment(), check=False, stdout=subprocess.DEVNULL)  # fmt: skip
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        os._exit(min(peak // 20, 255))  # in units of 20 MB
    _, status = os.waitpid(pid, 0)
    return 0, 20 * os.waitstatus_to_exitcode(status), (time.monotonic() - begin) / 60


def sentences(rng: random.Random, count: int) -> str:
    return " ".join(
        f"The {rng.choice(kills.NOUNS)} {rng.choice(kills.VERBS)} the {rng.choice(kills.NOUNS)}."
        for _ in range(count)
    )


def large_inputs(data: pathlib.Path, make: dict) -> dict:
    """Rows of 200,000 one-line documents, a 50 MB document, a 1 GB line of JSON."""
    rng, results = random.Random(0), []
    line = sentences(rng, 30)
    (data / "short.txt").write_text("\n\n".join(f"{line[:40]} {i}." for i in range(200_000)))
    (data / "long.txt").write_text("\n".join([line] * (50_000_000 // len(line))))
    with open(data / "line.jsonl", "w") as file:
        file.write('{"text": "A short one. It is."}\n{"text": "Another one. It is."}\n{"text": "')
        for _ in range(1_000):
            file.write(f"{line}\\n" * (1_000_000 // len(line)))
        file.write('"}\n')
    for name, kind in (("short.txt", "google"), ("long.txt", "books"), ("line.jsonl", "jsonl")):
        size = (data / name).stat().st_size / 1e6
        out = data / f"rows_{name}"
        command = ["prepare", "--vocab", data / "vocab", "--tokens", 64, "--pairs", "none"]
        _, peak, minutes = memory_of([*command, "--out", out, f"{kind}:{data / name}"])
        assert (out / "manifest.json").exists(), name
        # Lines of JSON above 268 million characters are left out with a warning.
        fate = " (left out with a warning)" if name == "line.jsonl" else ""
        results.append(f"{name} ({size:,.0f} MB){fate}: {peak:,} MB in {minutes:.1f} min")
        (data / name).unlink()
    return {"times": 3, "found": "; ".join(results)}


def a_vocabulary_of_much_text(data: pathlib.Path, make: dict, gigabytes: int = 5) -> dict:
    """`vocab` reads gigabytes of text, compressed."""
    rng, path = random.Random(0), data / "much.txt.gz"
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(100_000)]
    block = "\n".join(" ".join(rng.choices(words, k=12)) + "." for _ in range(120_000)).encode()
    with gzip.open(path, "wb", 1) as file:
        for _ in range(gigabytes * 10**9 // len(block)):
            file.write(block)
    out = data / "much"
    _, peak, minutes = memory_of(["vocab", "--out", out, "--size", 30_000, path])
    assert len((out / "vocab.txt").read_text().splitlines()) > 10_000
    return {"times": 1, "found": f"{gigabytes} GB: {peak:,} MB in {minutes:.1f} min"}


@contextlib.contextmanager
def served(scheme: str, data: pathlib.Path, name: str) -> Iterator:
    """Start a storage server that this process and its children use."""
    from tests.helpers.objects import serve

    with serve(scheme, str(data / name)) as server:
        os.environ.update(server.environment, BERT_JAX_STORAGE_CACHE=str(data / f"{name}_cache"))
        filesystem = storage.objects.filesystem
        filesystem(scheme).clear_instance_cache()  # of an earlier server
        filesystem.cache_clear()
        yield server


def differs(url: str, data: pathlib.Path, name: str) -> list[str]:
    """Return the differences of a run on object storage from the undisturbed one."""
    names = list(storage.listing(url))
    storage.download([f"{url}/{n}" for n in names], [data / name / n for n in names])
    return kills.differences("pretrain", data / name, data / "pretrain")


# libfaketime and other libraries that replace clock_gettime leave the kernel's clock as it is, for
# which TensorStore waits. time-machine (from PyPI) changes the clock of Python, which leases run in.
ON_ANOTHER_CLOCK = """
import datetime
import sys
import time_machine
from bert_jax.cli import console
now = datetime.datetime.now(datetime.timezone.utc)
time_machine.travel(now + datetime.timedelta(hours=int(sys.argv.pop(1)))).start()
console()
"""


def clocks_an_hour_apart(data: pathlib.Path, make: dict) -> dict:
    """A run on gs:// and s3:// is killed and resumed on another host whose clock is an hour off."""
    rng, slowest = random.Random(0), 0.0
    (data / "clock.py").write_text(ON_ANOTHER_CLOCK)
    for scheme, hours in itertools.product(SCHEMES, (1, -1)):
        name = f"clock_{scheme}{hours}"
        with served(scheme, data, name) as server:
            url, enough = f"{server.url}/run", rng.randint(20, 60)
            first = started(make["pretrain"](url), host="other")
            while len(storage.listing(f"{url}/checkpoints")) < enough:
                assert first.poll() is None, first.communicate()[0]
            first.kill()
            first.communicate()
            lines, begin = starts(url), time.monotonic()
            second = started(make["pretrain"](url), program=(data / "clock.py", hours))
            while starts(url) == lines:
                assert second.poll() is None, second.communicate()[0]
                time.sleep(0.1)
            slowest = max(slowest, time.monotonic() - begin)
            text = second.communicate(timeout=600)[0]
            assert second.returncode == 0, text
            assert not (found := differs(url, data, f"{name}_run")), found
    return {"times": 4, "found": f"resumed within {slowest:.0f} s, and ended with the same bits"}


def fine_tuning_with_lora(data: pathlib.Path, make: dict) -> dict:
    """Fine-tuning with LoRA is killed at random moments and resumed."""

    def command(out: pathlib.Path) -> list:
        files = [f"--config.task.{name}={data / name}.csv" for name in ("train", "dev")]
        changes = [f"--config.{change}" for change in [*kills.FINETUNE.split(), "lora.rank=4"]]
        config = f"--config={kills.ROOT}/configs/table.py"
        return ["finetune", config, "--init", data / "pretrain", *changes, *files, "--workdir", out]

    rng, killed = random.Random(0), []
    kills.call(*command(data / "lora"))
    for i in range(2):
        out = data / f"lora_{i}"
        for moment in rng.sample(kills.MOMENTS["finetune"], 5):
            killed += [moment.__name__] * kills.kill_once(command(out), out, moment, rng)
        kills.call(*command(out))
        assert not (found := kills.differences("finetune", out, data / "lora")), found
    moments = ", ".join(killed).replace("_", " ")
    return {"times": len(killed), "found": f"the same bits in the end; killed when: {moments}"}


def an_extended_vocabulary(data: pathlib.Path, make: dict) -> dict:
    """`extend-vocab` is killed at random moments and started again."""

    def command(out: pathlib.Path) -> list:
        return ["extend-vocab", "--init", data / "pretrain", "--out", out, "--add", words]

    rng, killed, words, whole = random.Random(0), 0, data / "words.txt", data / "extended"
    words.write_text("wagon\nbridge\n")
    kills.call(*command(whole))
    for i in range(8):
        out = data / f"extended_{i}"
        moment = rng.choice((kills.writing, kills.writing, kills.any_time))
        killed += kills.kill_once(command(out), out, moment, rng)
        if not out.exists():
            kills.call(*command(out))
        assert kills.names(out) == kills.names(whole)
        assert not (found := kills.differences("import", out, whole)), found
    return {"times": killed, "found": "the folder was whole or not there; the same bits in the end"}


def trackers_without_a_server(data: pathlib.Path, make: dict) -> dict:
    """The servers of trackers refuse connections, or accept them and never answer."""
    variables, found = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_BASE_URL"}, []
    for tracker, variable in variables.items():
        for is_silent in (False, True):
            command = make["pretrain"](out := data / f"{tracker}_{is_silent}")
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                if is_silent:
                    s.listen(64)
                url, begin = f"http://127.0.0.1:{s.getsockname()[1]}", time.monotonic()
                environment = {variable: url, "WANDB_API_KEY": 40 * "0"}
                process = started([*command, f"--config.trackers={tracker}"], **environment)
                text = process.communicate(timeout=1800)[0]
            what = "silent" if is_silent else "refusing"
            found.append(f"{time.monotonic() - begin:.0f} s ({tracker}, {what})")
            assert process.returncode == 2, text
            assert f"{tracker} does not start" in text.splitlines()[-1], text
            assert "Traceback" not in text, text
            kills.call(*command)
            assert not kills.differences("pretrain", out, data / "pretrain")
    return {"times": 4, "found": f"one line and status 2 after {', '.join(found)}"}


def requests_in_another_order(data: pathlib.Path, make: dict) -> dict:
    """Storage receives 1 of 20 unconditional writes twice, a second apart, and others late."""
    statuses = []
    for scheme in SCHEMES:
        with served(scheme, data, f"{scheme}_replayed") as server:
            server.proxy.replay_every, url, status = 20, f"{server.url}/run", 75
            while status == 75:
                process = started(make["pretrain"](url))
                text, status = process.communicate(timeout=1200)[0], process.returncode
                statuses.append(f"{scheme}: {status}")
            assert status == 0, text
            assert not (found := differs(url, data, f"{scheme}_replayed_run")), found
    return {"times": 2, "found": f"the same bits in the end; statuses: {', '.join(statuses)}"}


def a_disk_that_turns_read_only(data: pathlib.Path, make: dict) -> dict:
    """The file system of a run (ext4) turns read-only at random moments, and is mounted again."""

    def shell(command: str) -> str:
        return subprocess.check_output(command, shell=True, text=True)

    image, disk, rng, ends = data / "disk.img", data / "read_only", random.Random(0), []
    disk.mkdir()
    shell(f"truncate -s 256M {image} && mkfs.ext4 -q {image}")
    for moment in rng.sample(kills.MOMENTS["pretrain"], 6):
        shell(f"mount -o loop,errors=remount-ro {image} {disk}")
        device = pathlib.Path(shell(f"findmnt -no SOURCE {disk}").strip()).name
        process, due = started(make["pretrain"](disk / "run")), moment(disk / "run", rng)
        while process.poll() is None and not due():
            time.sleep(kills.POLL_SECONDS)
        pathlib.Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("read-only")
        text = process.communicate(timeout=600)[0]
        ends.append(f"{moment.__name__}: {process.returncode}")
        assert process.returncode in (2, 75), text
        assert "Traceback" not in text, text
        shell(f"umount {disk}; e2fsck -p {image} || test $? -eq 1")
    shell(f"mount -o loop {image} {disk}")
    kills.call(*make["pretrain"](disk / "run"))
    assert not (found := kills.differences("pretrain", disk / "run", data / "pretrain")), found
    shell(f"umount {disk}")
    statuses = ", ".join(ends).replace("_", " ")
    return {"times": 6, "found": f"one line and a status ({statuses}); the same bits in the end"}


def much_text(data: pathlib.Path, make: dict) -> dict:
    """`embed` reads 20,000 and 200,000 lines, and `prepare` 50 and 500 MB of text."""
    rng, results, path = random.Random(0), [], data / "much_text.txt"
    lines = [f"{sentences(rng, 1)} {i}" for i in range(200_000)]
    for count in (20_000, 200_000):
        path.write_text("\n".join(lines[:count]))
        out = data / f"vectors_{count}.npy"
        command = ["embed", "--init", data / "pretrain", "--out", out, path]
        _, peak, minutes = memory_of(command)
        assert out.exists()
        results.append(f"{count:,} lines: {peak:,} MB in {minutes:.1f} min")
    for size in (50, 500):
        with open(path, "w") as file:
            for _ in range(size):
                document = sentences(rng, 30)
                file.write(f"{document}\n\n" * (1_000_000 // len(document)))
        out = data / f"rows_{size}"
        command = ["prepare", "--vocab", data / "vocab", "--tokens", 64, "--out", out, path]
        _, peak, minutes = memory_of(command)
        assert (out / "manifest.json").exists()
        results.append(f"{size} MB: {peak:,} MB in {minutes:.1f} min")
    return {"times": 4, "found": "; ".join(results)}


ATTACKS = (
    two_devices_then_one,
    another_number_of_workers,
    a_process_that_stands_still,
    a_sweep_whose_run_is_killed,
    evaluation_beside_fine_tuning,
    predictions_on_a_full_disk,
    large_inputs,
    a_vocabulary_of_much_text,
    clocks_an_hour_apart,
    fine_tuning_with_lora,
    an_extended_vocabulary,
    trackers_without_a_server,
    requests_in_another_order,
    a_disk_that_turns_read_only,
    much_text,
)


def main() -> None:
    """Run the situations and record the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[attack.__name__ for attack in ATTACKS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bert_jax_attacks_") as temporary:
        data = pathlib.Path(temporary)
        kills.corpus(data)
        make = kills.commands(data)
        for scenario in ("pretrain", "finetune", "prepare"):
            kills.call(*make[scenario](data / scenario))
        for attack in ATTACKS:
            if options.only and attack.__name__ not in options.only:
                continue
            result = attack(data, make)
            line = {"attack": attack.__name__, "what": attack.__doc__, **result}
            before = RESULTS.read_text().splitlines() if RESULTS.exists() else []
            others = [each for each in before if json.loads(each)["attack"] != attack.__name__]
            RESULTS.write_text("\n".join([*others, json.dumps(line)]) + "\n")
            print(f"{attack.__name__}: {result['found']}", flush=True)


if __name__ == "__main__":
    main()
