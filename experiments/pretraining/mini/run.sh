#!/usr/bin/env bash
# BERT-mini on Wikipedia and novels with the recipe of the config `mini`, on 2 CPU cores.
# Text: $BERT_JAX_DATA/text/{wikipedia,books}. Run from the root of the repository; run it again after
# a kill to resume. experiments/pretraining/mini/record.py writes the page.
set -euo pipefail
experiments/pretraining/mini/rows.sh 8 16 32 64 128
bert-jax pretrain --config mini --rows runs/mini-rows8 --rows runs/mini-rows16 --rows runs/mini-rows32 \
  --rows runs/mini-rows64 --rows runs/mini-rows128 --workdir runs/mini --config.steps="${STEPS:-8000}"
