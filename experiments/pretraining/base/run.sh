#!/usr/bin/env bash
# BERT-base on Wikipedia and novels in some minutes of one GPU. Text: $BERT_JAX_DATA/text/{wikipedia,books}.
# Run from the root of the repository; run it again after a kill to resume. Arguments go to pretrain.
# experiments/pretraining/mini/record.py --workdir runs/base --page experiments/pretraining/base writes the page.
#
# The recipe is that of the small sizes (configs/pretrain.py) with larger batches and a lower learning
# rate: short rows first, 40% masking, no dropout, no next-sentence prediction, AdamW with beta2 0.98.
set -euo pipefail
experiments/pretraining/mini/rows.sh 16 128
bert-jax pretrain --config base,16=0.2,128=0.8 --rows runs/mini-rows16 --rows runs/mini-rows128 \
  --workdir runs/base --config.steps="${STEPS:-8000}" \
  '--config.phases[0].batch_size=1024' --config.batch_size=128 --config.model.dtype=bfloat16 \
  --config.model.vocab_multiple=128 --config.model.dropout=0 --config.model.attention_dropout=0 \
  --config.model.next_sentence=false --config.masking.rate=0.4 --config.optim.optimizer=adamw \
  --config.optim.learning_rate=3e-4 --config.optim.beta2=0.98 --config.warmup_fraction=0.0667 \
  --config.evaluate_every_steps=500 --config.evaluate_rows=1024 --config.checkpoint.every_steps=2000 "$@"
