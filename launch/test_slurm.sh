#!/usr/bin/env bash
# Test `bert-jax launch --on slurm` on a real Slurm whose daemons run on the loopback interface. Jobs
# of two tasks are stopped, preempted, killed and rejected; the test checks how they end. The jobs are
# small counting programs and, with --train, real training, in a folder and on object storage.
#
#   apt-get install slurm-wlm munge        (Debian, as root)
#   launch/test_slurm.sh [--train] [--tasks N] [--python PYTHON]
#
# Needs no accelerator and takes minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD python=python3 tasks=2 train=""
while [ $# -gt 0 ]; do
  case $1 in
    --train)
      train=yes
      shift
      continue
      ;;
    --python) python=$(command -v "$2") ;;
    --tasks) tasks=$2 ;;
    *) echo "test_slurm.sh: unknown $1" >&2 && exit 2 ;;
  esac
  shift 2
done
for program in slurmctld slurmd munged sbatch; do
  command -v "$program" >/dev/null || { echo "no $program: apt-get install slurm-wlm munge" >&2 && exit 2; }
done

work=$(mktemp -d)
chmod 755 "$work"
export SLURM_CONF=$work/slurm.conf PYTHONPATH=$checkout JAX_PLATFORMS=cpu
export XLA_FLAGS=--xla_backend_optimization_level=0 BERT_JAX_CACHE=$work/cache
export BERT_JAX_LAUNCH=$work/jobs BERT_JAX_STORAGE_CACHE=$work/storage
pids=()
finish() {
  # Stop the daemons last: only they can end remaining jobs.
  for job in $(squeue --noheader --format=%A 2>/dev/null); do
    scancel --signal=KILL --full "$job" && scancel "$job" || true
  done
  for _ in $(seq 30); do
    [ -n "$(squeue --noheader 2>/dev/null)" ] || break
    sleep 1
  done
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT

fail() {
  echo "FAILED: $*"
  tail -n 40 "$work"/*-*.out "$work"/slurmctld.log >&2 || true
  exit 1
}

daemons() {
  mkdir -p "$work"/{munge,state,spool}
  chmod 700 "$work/munge"
  dd if=/dev/urandom of="$work/munge/key" bs=64 count=1 status=none
  chmod 400 "$work/munge/key"
  munged --foreground --force --key-file="$work/munge/key" --socket="$work/munge.socket" \
    --pid-file="$work/munge/pid" --log-file="$work/munge/log" --seed-file="$work/munge/seed" 2>/dev/null &
  pids+=($!)
  cat >"$SLURM_CONF" <<EOF
ClusterName=loopback
SlurmctldHost=localhost
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket,cred_expire=10
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=low Nodes=localhost Default=YES MaxTime=60 PriorityTier=1 GraceTime=120
PartitionName=high Nodes=localhost MaxTime=60 PriorityTier=10
EOF
  slurmctld -D >/dev/null 2>&1 &
  pids+=($!)
  slurmd -D -N localhost >/dev/null 2>&1 &
  pids+=($!)
  until sinfo --noheader --format=%T 2>/dev/null | grep -q idle; do
    sleep 1
    [ "$((++waited))" -lt 60 ] || fail "the daemons do not start"
  done
  echo "Slurm $(sinfo --version | cut -d ' ' -f 2), one node, $(nproc) CPUs"
}
waited=0

# field JOB NAME: print a field of a job.
field() { scontrol show job "$1" 2>/dev/null | grep -o "\b$2=[^ ]*" | head -n 1 | cut -d = -f 2; }

# A task of a counting job: appends a number per step to its own file, and resumes from it. The
# argument is what task 1 does at step 20 of the first run, if anything.
cat >"$work/count.py" <<'EOF'
import os, pathlib, signal, sys, time
rank, saved = os.environ["SLURM_PROCID"], pathlib.Path(f"{sys.argv[1]}.{os.environ['SLURM_PROCID']}")
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
step = len(saved.read_text().split()) if saved.exists() else 0
first = "SLURM_RESTART_COUNT" not in os.environ
assert os.environ["BERT_JAX_DISTRIBUTED"] == "auto"
while step < 60:
    with saved.open("a") as file:
        print(step, file=file)
    step += 1
    time.sleep(0.1)
    if step == 20 and first and rank == "1" and sys.argv[2:]:
        os.kill(os.getpid(), 9) if sys.argv[2] == "kill" else sys.exit(int(sys.argv[2]))
    if stop:
        time.sleep(1)  # saving takes time
        sys.exit(75)
EOF

# count NAME [AT-20]: submit a counting job and set `job`.
count() {
  job=$(cd "$work" && sbatch --parsable --job-name="$1" --ntasks-per-node=2 --time=30 \
    "$checkout/bert_jax/tools/launch/scripts/slurm.sh" --restarts=3 -- "$python" "$work/count.py" "$work/$1" "${@:2}")
  echo "$1: job $job"
}

# until_counted NAME N: wait until task 1 has reached step N.
until_counted() {
  until [ -s "$work/$1.1" ] && [ "$(wc -l <"$work/$1.1")" -ge "$2" ]; do sleep 0.1; done
}

# check_counted NAME: check that every task counted to 60 without gaps or repetitions.
check_counted() {
  local i
  for i in 0 1; do
    seq 0 59 | cmp - "$work/$1.$i" || fail "$1: task $i did not resume where it stopped"
  done
  echo "  both tasks counted from 0 to 59, each number once"
}

# check_ended RESTARTS [EXIT-CODE]: check how the job ended.
check_ended() {
  local actual
  actual="$(field "$job" Restarts) $(field "$job" ExitCode)"
  [ "$actual" = "$1 ${2:-0:0}" ] || fail "job $job: restarts and status are $actual"
}

# pretrain NAME FOLDER [ARGUMENT…]: submit a run of FOLDER/NAME and set `job`.
pretrain() {
  local name=$1 folder=$2
  shift 2
  local printed
  printed=$(cd "$work" && "$python" -m bert_jax launch --on slurm --name "$name" --restarts 3 \
    --cpus 1 --extra="--ntasks-per-node=$tasks" --extra=--time=30 -- \
    pretrain --config "$checkout/configs/pretrain.py:L2-H32-A2,32" --rows "$work/rows" \
    --config.batch_size=8 --config.steps=400 --config.optim.warmup_steps=5 \
    --config.log_every_steps=5 --config.evaluate_rows=16 --config.evaluate_every_steps=200 \
    --config.checkpoint.every_steps=100 --workdir "$folder/$name" "$@" 2>>"$work/launch.err") ||
    fail "launch: $(tail -n 1 "$work/launch.err")"
  job=${printed##* }
  echo "$name: job $job"
}

# until_lines NAME N: wait until the run has written N lines of metrics.
until_lines() {
  local file=$work/$1/metrics.jsonl
  until [ -s "$file" ] && [ "$(wc -l <"$file")" -ge "$2" ]; do
    sleep 0.1
    case $(field "$job" JobState) in FAILED | CANCELLED) fail "$1 ended early" ;; esac
  done
}

# objects: start a server of object storage.
objects() {
  "$python" - "$work" >"$work/server.env" <<'EOF' &
import sys, time
from tests.helpers.objects import serve
with serve("gs", f"{sys.argv[1]}/objects") as server:
    print(*(f"export {name}={value}" for name, value in server.environment.items()), sep="\n")
    print(f"bucket={server.url}", flush=True)
    time.sleep(3600)
EOF
  pids+=($!)
  until grep -q bucket "$work/server.env"; do sleep 0.2; done
  # shellcheck disable=SC1091
  . "$work/server.env"
}

# until_saved FOLDER: wait until a run on object storage has a checkpoint.
until_saved() {
  "$python" - "$1" <<'EOF'
import sys, time
from bert_jax import storage
while not any(name.endswith("manifest.json") for name in storage.listing(f"{sys.argv[1]}/checkpoints")):
    time.sleep(0.2)
EOF
}

# until_state JOB STATE: wait for the state and log it.
until_state() {
  local state
  while true; do
    state=$(field "$1" JobState)
    [ "$state" != "$2" ] || break
    case $state in FAILED | CANCELLED | COMPLETED) fail "job $1 is $state, not $2" ;; esac
    sleep 0.2
  done
  echo "  job $1: $2, exit status $(field "$1" ExitCode), restarts $(field "$1" Restarts)"
}

data() {
  "$python" - "$work" <<'EOF'
import pathlib, random, sys
from bert_jax.data import prepare, wordpiece
rng, work = random.Random(0), pathlib.Path(sys.argv[1])
nouns, verbs = "king river book city horse letter ship garden".split(), "sees finds builds leaves".split()
text = "\n\n".join("\n".join(f"The {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}."
                             for _ in range(rng.randint(4, 30))) for _ in range(60))
(work / "text.txt").write_text(text + "\n")
wordpiece.train([str(work / "text.txt")], str(work / "vocab"), size=120)
prepare.prepare([str(work / "text.txt")], str(work / "vocab"), str(work / "rows"), tokens=32,
                sequences=3, heldout_fraction=0.1, workers=1)
EOF
}

# check_same FOLDER: check that the run equals the uninterrupted one, bit for bit.
check_same() {
  "$python" - "$work/run-whole" "$1" <<'EOF' || fail "$1: it differs from the uninterrupted run"
import pathlib, sys, jax, numpy as np
from bert_jax import storage
from bert_jax.runs import checkpoint
metrics = [pathlib.Path(storage.local(f"{f}/metrics.jsonl")).read_bytes() for f in sys.argv[1:]]
assert metrics[0] == metrics[1], "metrics differ"
(a, step), (b, also) = [checkpoint.load_model(f, "latest")[2:4] for f in sys.argv[1:]]
assert step == also == 400, (step, also)
for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
EOF
  echo "  ${1/#$work\//}: metrics.jsonl and parameters at step 400 equal those of the uninterrupted run, bit for bit"
}

daemons

count whole
until_state "$job" COMPLETED
check_ended 0
check_counted whole

count stopped
until_counted stopped 10
scancel --signal=TERM "$job"
echo "  SIGTERM to its tasks"
until_state "$job" COMPLETED
check_ended 1
check_counted stopped

count preempted
until_counted preempted 10
urgent=$(sbatch --parsable --partition=high --output=/dev/null --wrap="sleep 1")
echo "  preempted by job $urgent"
until_state "$urgent" COMPLETED
until_state "$job" COMPLETED
check_ended 1
check_counted preempted

count killed kill # the other task is stopped; both resume
until_state "$job" COMPLETED
check_ended 1

count mistaken 2 # the other task is stopped and ends with 75
until_state "$job" FAILED
check_ended 0 2:0

job=$(cd "$work" && sbatch --parsable --job-name=cpus --ntasks-per-node=1 --cpus-per-task="$(nproc)" \
  "$checkout/bert_jax/tools/launch/scripts/slurm.sh" -- "$python" -c \
  "import os; assert len(os.sched_getaffinity(0)) == $(nproc), os.sched_getaffinity(0)")
echo "cpus: job $job"
until_state "$job" COMPLETED # its task has all the CPUs that the job asked for

count cancelled
until_counted cancelled 10
scancel "$job"
until_state "$job" CANCELLED
sleep 3
[ "$(field "$job" JobState) $(field "$job" Restarts)" = "CANCELLED 0" ] || fail "cancelled: still running"

if [ -n "$train" ]; then
  data >/dev/null

  pretrain run-whole "$work"
  until_lines run-whole 1
  "$python" -m bert_jax launch status run-whole | grep "^run-whole: running" || fail "run-whole: its state"
  until_state "$job" COMPLETED

  pretrain run-stopped "$work"
  until_lines run-stopped 20
  scancel --signal=TERM "$job"
  echo "  SIGTERM after $(wc -l <"$work/run-stopped/metrics.jsonl") lines of metrics"
  until_state "$job" COMPLETED
  check_ended 1
  grep -h "launch: status 75" "$work/run-stopped-$job.out" | while read -r line; do echo "  $line"; done
  check_same "$work/run-stopped"

  pretrain run-preempted "$work"
  until_lines run-preempted 20
  urgent=$(sbatch --parsable --partition=high --output=/dev/null --wrap="sleep 1")
  echo "  preempted by job $urgent after $(wc -l <"$work/run-preempted/metrics.jsonl") lines of metrics"
  until_state "$urgent" COMPLETED
  until_state "$job" COMPLETED
  check_ended 1
  check_same "$work/run-preempted"

  objects
  pretrain run-moved "$bucket" # stopped, and started again on another machine, with no local copies
  until_saved "$bucket/run-moved"
  scancel --signal=TERM "$job"
  echo "  SIGTERM after its first checkpoint on object storage"
  until [ "$(field "$job" JobState)" = PENDING ]; do sleep 0.2; done
  rm -rf "$BERT_JAX_STORAGE_CACHE"
  until_state "$job" COMPLETED
  check_ended 1
  check_same "$bucket/run-moved"

  pretrain run-mistaken "$work" --config.batch_size=7 # not divisible by two tasks
  until_state "$job" FAILED
  check_ended 0 2:0
fi

echo "all tests passed"
