#!/usr/bin/env bash
# Create a Cloud TPU slice and wait until it is active.
#
#   launch/tpu_slice.sh NAME --zone=ZONE [--project=PROJECT] -- CREATE-COMMAND…
#
# An existing queued resource is reused. A preempted one is deleted and created again with
# CREATE-COMMAND, as is one that failed before. Exit status 2: it cannot be created, and a retry would
# not help.
set -euo pipefail
name=$1
shift
where=()
while [ "$1" != -- ]; do
  where+=("$1")
  shift
done
shift

queued() {
  gcloud compute tpus queued-resources "$1" "$name" "${where[@]}" "${@:2}"
}

created="" shown="" exists=""
while true; do
  # Without the launcher, nothing would delete the slice.
  [ "$(ps -o ppid= -p $$ 2>/dev/null || echo "$PPID")" -eq "$PPID" ] || exit 2
  state=$(queued describe --format='value(state.state)' 2>/dev/null || true)
  if [ -n "$state" ]; then
    exists=yes
  elif [ -n "$exists" ]; then
    if [[ $(queued describe 2>&1 || true) == *NOT_FOUND* ]]; then
      exists="" # somebody else deleted it
    else
      state="no answer" # the query failed
    fi
  fi
  if [ "$state" != "$shown" ]; then
    echo "launch: $name: ${state:-does not exist}" >&2
    shown=$state
  fi
  case $state in
    ACTIVE) exit 0 ;;
    FAILED)
      if [ -n "$created" ]; then
        queued describe --format='value(state)' >&2
        exit 2
      fi
      queued delete --force --quiet || exit 2
      exists=""
      ;;
    SUSPENDED)
      queued delete --force --quiet || exit 2
      exists=""
      ;;
    "")
      "$@" || exit 2
      created=yes exists=yes
      ;;
    *) sleep "${TPU_SLICE_POLL_SECONDS:-30}" ;;
  esac
done
