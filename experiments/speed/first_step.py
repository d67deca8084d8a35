"""Run the first training step of a transformers model as in a user's script.

    python first_step.py FILE [--compile]

FILE is written by torch.save and contains the "config" of a BertForPreTraining and the "inputs" of a
step. Prints "done" after the step. Does not import bert_jax, whose import time would count.
"""

import os
import sys

import torch
import transformers


def main() -> None:
    """Run the command line."""
    path, *options = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    saved = torch.load(path, weights_only=True)
    config = transformers.BertConfig(**saved["config"])
    model = transformers.BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if "--compile" in options else model
    forward(**saved["inputs"]).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print("done", flush=True)


if __name__ == "__main__":
    main()
