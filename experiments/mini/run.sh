#!/usr/bin/env bash
# BERT-mini on Wikipedia and novels with the recipe of the config `mini`, on 2 CPU cores.
# Text: $BERT_JAX_DATA/text/{wikipedia,books}. Run from the root of the repository; run it again after
# a kill to resume. experiments/mini/record.py writes the page.
set -euo pipefail
root=$PWD steps=${STEPS:-8000}
cd "$BERT_JAX_DATA/text"
[ -e "$root/runs/vocab8k/vocab.txt" ] ||
  bert-jax vocab --out "$root/runs/vocab8k" --size 8192 'wikipedia/*.gz' 'books:books/*.gz'
rows=()
for tokens in 8 16 32 64 128; do
  bert-jax prepare --vocab "$root/runs/vocab8k" --out "$root/runs/mini-rows$tokens" \
    --tokens "$tokens" --sequences "$((tokens > 32 ? tokens / 32 : 1))" --pairs none \
    'wikipedia/*.gz' 'books:books/*.gz'
  rows+=(--rows "runs/mini-rows$tokens")
done
cd "$root"
bert-jax pretrain --config mini "${rows[@]}" --workdir runs/mini --config.steps="$steps"
