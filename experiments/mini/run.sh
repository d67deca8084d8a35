#!/usr/bin/env bash
# BERT-mini on Wikipedia and novels, packed rows of T=128: about half an hour on 2 CPU cores.
# Text: $BERT_JAX_DATA/text/{wikipedia,books}. Run from the root of the repository. Started again
# after a kill, it goes on where it was; experiments/mini/record.py writes the README. AdamW,
# because BERT's Adam without bias correction takes its largest steps in the first thousand and
# wants a far longer warm-up than a run this short has.
set -euo pipefail
root=$PWD
cd "$BERT_JAX_DATA/text"
[ -e "$root/runs/vocab16k/vocab.txt" ] ||
  bert-jax vocab --out "$root/runs/vocab16k" --size 16384 'wikipedia/*.gz' 'books:books/*.gz'
bert-jax prepare --vocab "$root/runs/vocab16k" --out "$root/rows" --tokens 128 --sequences 4 \
  'wikipedia/*.gz' 'books:books/*.gz'
cd "$root"
bert-jax pretrain --config configs/pretrain.py:mini,128 --rows rows --workdir runs/mini \
  --config.steps=1000 --config.batch_size=32 --config.optim.optimizer=adamw \
  --config.optim.learning_rate=1e-3 --config.optim.warmup_steps=200 --config.evaluate_every_steps=200 \
  --config.checkpoint.every_steps=100 --config.evaluate_rows=1024 --config.log_every_steps=10
bert-jax evaluate --workdir runs/mini --all
