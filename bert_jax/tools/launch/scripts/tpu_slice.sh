#!/usr/bin/env bash
# Create a Cloud TPU slice and wait until it is active.
#
#   tpu_slice.sh NAME --zone=ZONE [--project=PROJECT] -- CREATE-COMMAND…
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

# An answer such as "too many requests" may pass: the state is asked for again, and the third one is final.
failed() {
  failures=$((failures + 1))
  [ "$failures" -lt 3 ] || { echo "$state" >&2 && exit 2; }
  sleep "${TPU_SLICE_POLL_SECONDS:-30}"
}

created="" shown="" failures=0 answered=""
while true; do
  # Without the launcher, nothing would delete the slice.
  [ "$(ps -o ppid= -p $$ 2>/dev/null || echo "$PPID")" -eq "$PPID" ] || exit 2
  if state=$(queued describe --format='value(state.state)' 2>&1) || [[ $state == *NOT_FOUND* ]]; then
    answered=yes
    [[ $state != *NOT_FOUND* ]] || state=""
  else
    state="no answer: $(grep -im 1 error <<<"$state" || tail -n 1 <<<"$state")"
    [ -n "$answered" ] || failed
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
      queued delete --force --quiet || failed
      ;;
    SUSPENDED) queued delete --force --quiet || failed ;;
    "") "$@" && created=yes || failed ;;
    *) sleep "${TPU_SLICE_POLL_SECONDS:-30}" ;;
  esac
done
