#!/usr/bin/env bash
# Slurm job that requeues itself while its command exits with a status that asks for a restart.
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=4 slurm.sh [OPTION…] -- COMMAND…
#
#   --restarts=N      maximum number of restarts (default 100)
#   --module=NAME     environment module to load; repeatable
#   --srun=ARGUMENT   argument of srun, such as --srun=--container-image=IMAGE; repeatable
#
# One task per GPU, as JAX's Slurm support expects, or one task for all. Slurm itself requeues preempted jobs
# (PreemptMode=REQUEUE). This script requeues after status 75 (state saved after SIGTERM, which Slurm
# sends before the time limit) and after a process was killed.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180
set -u
restarts=100
options=()
while [ "$1" != -- ]; do
  case $1 in
    --restarts=*) restarts=${1#*=} ;;
    --module=*) module load "${1#*=}" || exit 2 ;;
    --srun=*) options+=("${1#*=}") ;;
    *) echo "slurm.sh: unknown option $1" >&2 && exit 2 ;;
  esac
  shift
done
shift

# From Slurm 22.05 on, srun does not take this over from sbatch.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")

# srun returns the highest status of its tasks. User errors (2) and tracebacks (1) are mapped above
# the statuses of tasks that were stopped because of them. The trap lets the command finish saving.
# A single task uses all GPUs of its machine; with BERT_JAX_DISTRIBUTED, JAX would give it one.
task='[ "${SLURM_STEP_NUM_TASKS:-1}" = 1 ] || export BERT_JAX_DISTRIBUTED=auto; trap : INT TERM; "$@"; status=$?; exit $((status == 1 || status == 2 ? 256 - status : status))'
srun --kill-on-bad-exit=1 ${options[@]+"${options[@]}"} bash -c "$task" task "$@"
status=$?
if [ "$status" -ge 254 ]; then
  status=$((256 - status))
fi

if { [ "$status" -eq 75 ] || [ "$status" -ge 128 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt "$restarts" ]; then
  echo "launch: status $status, requeued (restart $((${SLURM_RESTART_COUNT:-0} + 1)) of $restarts)"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
