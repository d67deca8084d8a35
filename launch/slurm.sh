#!/usr/bin/env bash
# A Slurm job that goes back into the queue for as long as its command asks to be run again.
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm.sh RESTARTS COMMAND…
#
# One task a GPU: that is how JAX divides a node's devices under Slurm. What is preempted
# (PreemptMode=REQUEUE) Slurm queues again itself; here it is done for status 75 (saved after
# SIGTERM, which comes before the time limit) and for a process that was killed.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180
set -u
restarts=$1
shift
export BERT_JAX_DISTRIBUTED=auto

# srun's status is the highest of its tasks'. A mistake (2) or a traceback (1) is lifted above the
# statuses of the tasks that were stopped because of it. The trap lets the command finish saving.
task='trap : INT TERM; "$@"; status=$?; exit $((status == 1 || status == 2 ? 256 - status : status))'
srun --kill-on-bad-exit=1 bash -c "$task" task "$@"
status=$?
if [ "$status" -ge 254 ]; then
  status=$((256 - status))
fi

if { [ "$status" -eq 75 ] || [ "$status" -ge 128 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt "$restarts" ]; then
  echo "launch: status $status, queued again (restart $((${SLURM_RESTART_COUNT:-0} + 1)) of $restarts)"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
