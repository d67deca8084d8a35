"""Run the first training step of a transformers model as in a user's script.

    python first_step.py GIVEN [--compile]

GIVEN is a file of torch.save: "config", of a BertForPreTraining, and "inputs" of a step. Says "done".
Nothing of bert_jax is imported, for that is not what they wait for.
"""

import os
import sys

import torch
import transformers


def main() -> None:
    """Run the command line."""
    path, *options = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    given = torch.load(path, weights_only=True)
    config = transformers.BertConfig(**given["config"])
    model = transformers.BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if "--compile" in options else model
    forward(**given["inputs"]).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print("done", flush=True)


if __name__ == "__main__":
    main()
