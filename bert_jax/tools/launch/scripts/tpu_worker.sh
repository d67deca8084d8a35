#!/usr/bin/env bash
# Runs on each worker of a Cloud TPU slice, in the home folder, next to CODE and job.sh.
#
#   tpu_worker.sh start CODE LOGS   install CODE, a bundle of Git or a wheel, and start job.sh as a service,
#                                   unless it is running; its output is copied to the folder LOGS on
#                                   object storage, unless that is empty; exit status 3: another job.sh
#                                   is running
#   tpu_worker.sh follow            print its output and return its exit status
#   tpu_worker.sh state             print "waiting", "running" or its exit status, and the last lines of
#                                   its output
#   tpu_worker.sh stop              stop it, and wait until it has saved
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
  # The system's Python may be too old for JAX; uv installs one.
  if [ ! -x uv/bin/uv ]; then
    python3 -m venv uv || { sudo apt-get -qq update && sudo apt-get -qq install --yes python3-venv && python3 -m venv uv; }
    uv/bin/pip install --quiet uv
  fi
  [ -d venv ] || uv/bin/uv venv --quiet --python 3.12 venv
  local package=("./$1[cloud,tpu]") # a path: a name would be installed from the internet
  if [ "${1##*.}" = bundle ]; then
    package=(--editable "./bert_jax[cloud,tpu]")
    if [ "$(git -C bert_jax rev-parse HEAD 2>/dev/null)" != "$(git bundle list-heads "$1" | cut -d ' ' -f 1)" ]; then
      rm -rf bert_jax
      git clone --quiet "$1" bert_jax
    fi
  fi
  mkdir -p bert_jax
  uv/bin/uv pip install --quiet --python venv/bin/python "${package[@]}"
  cmp --quiet job.sh started.sh || rm -f job.log # of an earlier command
  rm -f job.status
  cp job.sh started.sh
  sudo systemctl reset-failed bert-jax 2>/dev/null || true
  sudo systemd-run --quiet --unit=bert-jax --uid="$(id -u)" --gid="$(id -g)" \
    --setenv=HOME="$HOME" --property=LimitMEMLOCK=infinity --property=TimeoutStopSec=180 \
    --property=StandardOutput="append:$HOME/job.log" \
    --property=StandardError="append:$HOME/job.log" \
    /bin/bash "$HOME/tpu_worker.sh" run "$2"
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

state() {
  if systemctl is-active --quiet bert-jax; then
    echo running
  elif ! cmp --quiet job.sh started.sh; then
    echo waiting # a command is being installed
  else
    cat job.status 2>/dev/null || echo 75
  fi
  tail -n 5 job.log 2>/dev/null || true
}

stop() {
  sudo systemctl stop bert-jax
}

cd "$HOME"
"$@"
exit # this file may have been replaced in the meantime
