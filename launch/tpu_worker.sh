#!/usr/bin/env bash
# Runs on each worker of a Cloud TPU slice, in the home folder, next to code.bundle and job.sh.
#
#   tpu_worker.sh start [BUCKET]   mount, install, start job.sh as a service, unless it is running
#   tpu_worker.sh follow           print its output and return its exit status
#
# A service survives the connection that started it, and receives SIGTERM on preemption. `follow`
# exits with 0, 2, 75, 128 or more (killed), or 70 for any other failure; 1 and 255 mean that the
# connection was lost. `start` fails with 2.
set -euo pipefail

start() {
  set -E
  trap 'exit 2' ERR
  if systemctl is-active --quiet bert-jax; then
    return
  fi
  if [ -n "${1-}" ] && ! mountpoint -q /bucket; then
    mount_bucket "$1"
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
  "$uv" pip install --quiet --python venv/bin/python --editable 'bert_jax[tpu]'
  rm -f job.status
  sudo systemctl reset-failed bert-jax 2>/dev/null || true
  sudo systemd-run --quiet --unit=bert-jax --uid="$(id -u)" --gid="$(id -g)" \
    --setenv=HOME="$HOME" --property=LimitMEMLOCK=infinity --property=TimeoutStopSec=180 \
    --property=StandardOutput="append:$HOME/job.log" \
    --property=StandardError="append:$HOME/job.log" \
    /bin/bash "$HOME/tpu_worker.sh" run
}

mount_bucket() {
  if ! command -v gcsfuse >/dev/null; then
    local key=/usr/share/keyrings/cloud.google.asc
    curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$key" >/dev/null
    echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get update -qq
    sudo apt-get install -qq gcsfuse
  fi
  sudo mkdir -p /bucket
  sudo chown "$(id -u)" /bucket
  # Checkpoints are committed by renaming their folder, which gcsfuse only allows with this limit.
  gcsfuse --implicit-dirs --rename-dir-limit=100000 "$1" /bucket
}

run() {
  trap : TERM # the job receives it too: wait until it has saved
  local status=0
  bash job.sh || status=$?
  echo "$status" >job.status
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

cd "$HOME"
"$@"
exit # this file may have been replaced in the meantime
