#!/usr/bin/env bash
# Runs on each worker of a Cloud TPU slice, in the home folder, next to code.bundle and job.sh.
#
#   tpu_worker.sh start LOGS   install, start job.sh as a service, unless it is running; its output is
#                              copied to the folder LOGS on object storage, unless that is empty;
#                              exit status 3: another job.sh is running
#   tpu_worker.sh follow       print its output and return its exit status
#   tpu_worker.sh stop         stop it, and wait until it has saved
#
# A service survives the connection that started it, and receives SIGTERM on preemption. `follow`
# exits with 0, 2, 75, 128 or more (killed), or 70 for any other failure; 1 and 255 mean that the
# connection was lost. `start` fails with 2.
set -euo pipefail

start() {
  set -E
  trap 'exit 2' ERR
  if systemctl is-active --quiet bert-jax; then
    cmp --quiet job.sh started.sh && return
    echo "launch: another command is running: stop it with \`bert-jax launch stop NAME\` first" >&2
    exit 3
  fi
  local commit uv="$HOME/.local/bin/uv"
  commit=$(git bundle list-heads code.bundle | cut -d ' ' -f 1)
  if [ "$(git -C bert_jax rev-parse HEAD 2>/dev/null)" != "$commit" ]; then
    rm -rf bert_jax
    git clone --quiet code.bundle bert_jax
  fi
  # The system's Python may be too old for JAX; uv installs one.
  python3 -m pip install --quiet --user uv
  [ -d venv ] || "$uv" venv --quiet --python 3.12 venv
  "$uv" pip install --quiet --python venv/bin/python --editable 'bert_jax[tpu,gcs,s3,tfds,wiki,wandb,mlflow]'
  rm -f job.status
  cp job.sh started.sh
  sudo systemctl reset-failed bert-jax 2>/dev/null || true
  sudo systemd-run --quiet --unit=bert-jax --uid="$(id -u)" --gid="$(id -g)" \
    --setenv=HOME="$HOME" --property=LimitMEMLOCK=infinity --property=TimeoutStopSec=180 \
    --property=StandardOutput="append:$HOME/job.log" \
    --property=StandardError="append:$HOME/job.log" \
    /bin/bash "$HOME/tpu_worker.sh" run "$1"
}

run() {
  trap : TERM # the job receives it too: wait until it has saved
  local status=0 copier=""
  if [ -n "$1" ]; then
    while sleep "${COPY_SECONDS:-60}"; do copy_log "$1" || true; done &
    copier=$!
  fi
  bash job.sh || status=$?
  if [ -n "$copier" ]; then
    kill "$copier" || true
    copy_log "$1" || echo "cannot copy job.log to $1" >&2
  fi
  echo "$status" >job.status
}

copy_log() {
  venv/bin/python - job.log "$1/$(hostname).log" <<'EOF'
import pathlib, sys
from bert_jax import storage
storage.upload([pathlib.Path(sys.argv[1])], [sys.argv[2]])
EOF
}

follow() {
  local pid status
  pid=$(systemctl show --property=MainPID --value bert-jax)
  touch job.log
  if [ "${pid:-0}" != 0 ]; then
    tail -n 100 -F --pid="$pid" job.log
  else
    tail -n 100 job.log
  fi
  status=$(cat job.status 2>/dev/null || echo 75) # none: the machine was shut down
  case $status in
    0 | 2 | 75) exit "$status" ;;
    *) exit $((status < 128 ? 70 : status)) ;;
  esac
}

stop() {
  sudo systemctl stop bert-jax
}

cd "$HOME"
"$@"
exit # this file may have been replaced in the meantime
