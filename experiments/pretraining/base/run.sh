#!/usr/bin/env bash
# Pretrain BERT-base on one GPU in calls of limited length, measure it and fine-tune it.
#
#   experiments/pretraining/base/run.sh DATA RUNS [SECONDS]
#
# Runs the sweep of this folder twice, as its probes choose the recipe. After SECONDS (default 570) it saves
# and exits with 75; the same command goes on from there. On an H100 three calls are expected: rows, probes and
# half of the pretraining; the rest of it and its losses; fine-tuning. RUNS keeps the results, which are copied to
# this folder, and the weights. On a CPU: SIZE=L2-H64-A1 TRAIN_SECONDS=20 PROBE_TOKENS=100000 run.sh …
set -euo pipefail

data=$(realpath "$1") runs=$2 deadline=$((SECONDS + ${3:-570}))
cd "$(dirname "$0")/../../.."
here=experiments/pretraining/base
mkdir -p "$runs"
if [ -f "$runs/results.jsonl" ]; then cp "$runs/results.jsonl" $here/; else rm -f $here/results.jsonl; fi
trap 'cp $here/results.jsonl "$runs/" 2>/dev/null || true' EXIT

for _ in probes "everything else"; do
  left=$((deadline - SECONDS - 20)) # saving takes some seconds
  timeout --foreground --preserve-status $left python -m bert_jax sweep $here --data "$data" --runs "$runs"
done
python -m bert_jax report $here
