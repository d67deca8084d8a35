#!/usr/bin/env bash
# Brings a Cloud TPU slice to life and waits for it.
#
#   launch/tpu_slice.sh NAME --zone=ZONE [--project=PROJECT] -- CREATE-COMMAND…
#
# A request that is there already is used. One whose machines were taken back (preemption) is
# deleted and made again with CREATE-COMMAND; so is an old one that failed. Status 2: it cannot be
# made, and trying again would not help.
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

created="" shown=""
while true; do
  state=$(queued describe --format='value(state.state)' 2>/dev/null || true)
  if [ "$state" != "$shown" ]; then
    echo "launch: $name is ${state:-not there}" >&2
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
      ;;
    SUSPENDED) queued delete --force --quiet || exit 2 ;;
    "")
      "$@" || exit 2
      created=yes
      ;;
    *) sleep "${TPU_SLICE_POLL_SECONDS:-30}" ;;
  esac
done
