#!/usr/bin/env bash
# Train a vocabulary of 8,192 word pieces in runs/vocab8k, unless it exists, and prepare rows of each given
# T in runs/mini-rowsT: experiments/pretraining/mini/rows.sh T...
# Text: $BERT_JAX_DATA/text/{wikipedia,books}. Run from the root of the repository.
set -euo pipefail
root=$PWD
cd "$BERT_JAX_DATA/text"
[ -e "$root/runs/vocab8k/vocab.txt" ] ||
  bert-jax vocab --out "$root/runs/vocab8k" --size 8192 'wikipedia/*.gz' 'books:books/*.gz'
for tokens in "$@"; do
  bert-jax prepare --vocab "$root/runs/vocab8k" --out "$root/runs/mini-rows$tokens" \
    --tokens "$tokens" --sequences "$((tokens > 32 ? tokens / 32 : 1))" --pairs none \
    'wikipedia/*.gz' 'books:books/*.gz'
done
