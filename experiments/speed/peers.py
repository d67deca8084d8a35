"""Peers: transformers in PyTorch on the CPU, and Hugging Face's datasets, in their idiomatic use."""

import itertools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import data
import numpy as np

from bert_jax.config.schema import Config
from bert_jax.data.loader import Batch, RowDataset, batches
from bert_jax.data.rows import layout
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.data.vocabulary_files import load

Turn = Callable[[], dict[str, Any]]
_LEARNING_RATE, _BATCH_TEXTS, _MOST_TOKENS = 1e-4, 32, 256
# PyTorch's label of positions that losses ignore.
_IGNORED = -100


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _torch() -> Any:
    import torch
    import transformers

    torch.set_num_threads(_cores())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch


def _tokenizer(vocabulary: Vocabulary) -> Any:
    import transformers

    special = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary.tokenizer(), **special)


def _collator(vocabulary: Vocabulary, rate: float) -> Any:
    import transformers

    return transformers.DataCollatorForLanguageModeling(
        _tokenizer(vocabulary), mlm_probability=rate
    )


def build(model: Any, positions: int) -> Any:
    """Return transformers' model of a `ModelConfig`: `BertForPreTraining` or `BertForMaskedLM`.

    If the head has no transform, the final LayerNorm of `teaching` or the identity replaces it. A model
    without segments keeps the embedding of a single segment.
    """
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.feed_forward,
        hidden_act=model.activation,
        hidden_dropout_prob=model.dropout,
        attention_probs_dropout_prob=model.attention_dropout,
        max_position_embeddings=positions,
        type_vocab_size=model.segments or 1,
        tie_word_embeddings=model.tied_decoder,
        attn_implementation="sdpa",
    )
    kind = "BertForPreTraining" if model.next_sentence else "BertForMaskedLM"
    network = getattr(transformers, kind)(config)
    if not model.transform:
        norm = torch.nn.LayerNorm(model.hidden, eps=model.norm.epsilon)
        network.cls.predictions.transform = norm if model.norm.final else torch.nn.Identity()
    return network


def inputs(batch: Batch, segments: int, collator: Any, fixed: bool = False) -> dict[str, Any]:
    """Convert rows, packed or not, to transformers' inputs, masked by its collator.

    Args:
        batch: a batch of `RowDataset`: B rows of T tokens with N sequences; P tokens are masked.
        segments: number of segments of the model.
        collator: `DataCollatorForLanguageModeling`.
        fixed: pad P and N so that compiled programs see one shape: N to the capacity of the rows, P to
            four standard deviations above its mean; further masked tokens are dropped.

    Returns:
        input_ids, position_ids, token_type_ids, labels: [B, T]. attention_mask: [B, T], or
        [B, 1, T, T] if rows may hold several sequences. places: [P], indices of masked tokens among all
        B T tokens, place_labels: [P]. cls: [N], indices of first tokens, next_sentence_label: [N].
    """
    import torch

    tokens = torch.from_numpy(batch["tokens"].astype(np.int64))
    size, slots = tokens.shape[1], batch["length"].shape[1]
    length, a_length = (batch[name].astype(np.int32) for name in ("length", "a_length"))
    row_layout = layout(length, a_length, size)
    sequence, position, segment, cls = (torch.from_numpy(x.astype(np.int64)) for x in row_layout)
    real = sequence < slots
    special = ~real | (position == 0) | (tokens == collator.tokenizer.sep_token_id)
    ids, labels = collator.torch_mask_tokens(tokens, special)
    places = (labels.flatten() != _IGNORED).nonzero()[:, 0]
    present = torch.from_numpy(length > 0)
    first = (cls + size * torch.arange(len(cls))[:, None])[present]
    next_labels = torch.from_numpy(batch["label"].astype(np.int64))[present]
    place_labels = labels.flatten()[places]
    if fixed:
        rate, limit = collator.mlm_probability, tokens.numel()
        limit = math.ceil(limit * rate + 4 * math.sqrt(limit * rate * (1 - rate)))
        places, place_labels = _pad(places, limit, 0), _pad(place_labels, limit, _IGNORED)
        first, next_labels = (
            _pad(x, present.numel(), y) for x, y in ((first, 0), (next_labels, _IGNORED))
        )
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    return {
        "input_ids": ids,
        "position_ids": position,
        "token_type_ids": segment if segments else torch.zeros_like(segment),
        "attention_mask": same if slots > 1 else real.long(),
        "labels": labels,
        "places": places,
        "place_labels": place_labels,
        "cls": first,
        "next_sentence_label": next_labels,
    }


def _pad(x: Any, size: int, value: int) -> Any:
    import torch

    return torch.nn.functional.pad(x[:size], (0, max(size - len(x), 0)), value=value)


_ENCODER = ("input_ids", "position_ids", "token_type_ids", "attention_mask")


def full_loss(model: Any, inputs: dict[str, Any]) -> Any:
    """Return transformers' loss, with logits for every token."""
    names = [*_ENCODER, "labels"]
    if hasattr(model.cls, "seq_relationship"):
        names.append("next_sentence_label")
    return model(**{name: inputs[name] for name in names}).loss


def gathered_loss(model: Any, inputs: dict[str, Any]) -> Any:
    """Return the same loss with logits for masked tokens only, on packed rows."""
    from torch.nn.functional import cross_entropy

    hidden = model.bert(**{name: inputs[name] for name in _ENCODER}).last_hidden_state.flatten(0, 1)
    loss = cross_entropy(model.cls.predictions(hidden[inputs["places"]]), inputs["place_labels"])
    if hasattr(model.cls, "seq_relationship"):
        pooler = model.bert.pooler
        pooled = pooler.activation(pooler.dense(hidden[inputs["cls"]]))
        scores = model.cls.seq_relationship(pooled)
        loss = loss + cross_entropy(scores, inputs["next_sentence_label"])
    return loss


class Training:
    """A training step: dropout, clipping and fused AdamW, on a GPU with autocast to bfloat16.

    Args:
        config: config of the model and its optimizer.
        gathered: compute logits for masked tokens only, not transformers' loss.
        compiled: use torch.compile.
        device: "cpu" or "cuda".
    """

    def __init__(self, config: Config, gathered: bool, compiled: bool, device: str = "cpu"):
        torch = _torch()
        self.device, self.clip_norm = device, config.optim.clip_norm
        self.model = build(config.model, config.model.positions).to(device).train()
        self.loss = gathered_loss if gathered else full_loss
        if compiled:
            self.loss = torch.compile(self.loss)
        parameters, decay = self.model.parameters(), config.optim.weight_decay
        self.optimizer = torch.optim.AdamW(
            parameters, _LEARNING_RATE, weight_decay=decay, fused=True
        )

    def step(self, inputs: dict[str, Any]) -> Any:
        """Run a step, on a GPU without waiting for it, and return the loss."""
        import torch

        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.loss(self.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def pretrain(
    size: str,
    tokens: int,
    sequences: int,
    batch: int,
    steps: int,
    gathered: bool = False,
    compiled: bool = False,
) -> Turn:
    """Run training steps of a transformers model in float32.

    Args:
        size, tokens, sequences, batch, steps: as in `ours.pretrain`, with the same rows.
        gathered, compiled: as in `Training`.
    """
    config = data.pretraining(size, tokens, batch)
    rows = RowDataset(data.rows(tokens, sequences), "train")
    vocabulary = load(data.vocabulary())
    config.model.vocab_size = len(vocabulary)
    training = Training(config, gathered, compiled)
    collator = _collator(vocabulary, config.masking.rate)
    stream = batches(rows, batch, config.seed, 0, config.steps)

    def step(arrays):
        training.step(inputs(arrays, config.model.segments, collator, fixed=compiled))

    return lambda: data.run_steps(step, itertools.islice(stream, steps))


def finetune(name: str, steps: int, grouped: bool) -> Turn:
    """Run training steps of transformers' Trainer on the same examples, padded to the longest of a batch.

    Args:
        name: name of a data set, as in `data.finetuning`.
        steps: steps per turn, not counting a first one that is not timed.
        grouped: group examples by length as train_sampling_strategy="group_by_length" does, which
            changes the composition of batches; a turn takes batches evenly from 50 sorted by length.
    """
    import ours
    import transformers
    from transformers.trainer_pt_utils import get_length_grouped_indices

    from bert_jax.data.examples import FIRST_STEPS, PackedBatches

    _torch()
    config, dataset = ours.load_finetuning(name)
    size, examples = config.batch_size, dataset.splits["train"]
    plan = PackedBatches(examples, size, 1)
    span = dataset.head == "span"
    kind = "AutoModelForQuestionAnswering" if span else "AutoModelForSequenceClassification"
    options = {} if span else {"num_labels": len(dataset.labels)}
    folder = data.recipes.minilm()
    model = getattr(transformers, kind).from_pretrained(folder, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lengths = examples.lengths().tolist()
    turn_numbers = itertools.count()

    def example(i):
        tokens, label = examples.tokens[i], examples.targets["label"][i]
        names = ("start_positions", "end_positions") if span else ("labels",)
        target = dict(zip(names, map(int, np.atleast_1d(label)), strict=True))
        segments = np.arange(len(tokens)) >= examples.a_length[i]
        return {
            "input_ids": tokens.tolist(),
            "attention_mask": [1] * len(tokens),
            "token_type_ids": segments.astype(int).tolist(),
            **target,
        }

    def members(number):
        first = FIRST_STEPS + number * (steps + 1)
        if not grouped:
            return [plan.members(step, 0) for step in range(first, first + steps + 1)]
        indices = [
            i for step in range(50 * number, 50 * number + 50) for i in plan.members(step, 0)
        ]
        # Sort 50 batches at a time, as Trainer does for data sets of 200 batches or more.
        order = get_length_grouped_indices([lengths[i] for i in indices], size, mega_batch_mult=50)
        groups = [[indices[i] for i in order[b : b + size]] for b in range(0, len(order), size)]
        groups.sort(key=lambda batch: max(lengths[i] for i in batch))
        selected = [groups[int((k + 0.5) / steps * len(groups))] for k in range(steps)]
        return [selected[0], *selected]

    class Clock(transformers.TrainerCallback):
        times = ()

        def on_step_end(self, *_, **__):
            self.times = [*self.times, time.perf_counter()]

    def turn():
        step_members, clock = members(next(turn_numbers)), Clock()
        with tempfile.TemporaryDirectory() as out:
            arguments = transformers.TrainingArguments(
                output_dir=out,
                per_device_train_batch_size=size,
                max_steps=steps + 1,
                learning_rate=config.optim.learning_rate,
                weight_decay=config.optim.weight_decay,
                train_sampling_strategy="sequential",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            )
            transformers.Trainer(
                model,
                arguments,
                train_dataset=[example(i) for batch in step_members for i in batch],
                data_collator=transformers.DataCollatorWithPadding(tokenizer),
                callbacks=[clock],
            ).train()
        timed = step_members[1:]
        return {
            "steps": steps,
            "seconds": clock.times[-1] - clock.times[0],
            "examples": steps * size,
            "real_tokens": sum(lengths[i] for batch in timed for i in batch),
            "padded_tokens": sum(size * max(lengths[i] for i in batch) for batch in timed),
        }

    return turn


def embed(texts: int, by_length: bool) -> Turn:
    """Embed texts with all-MiniLM-L6-v2 in transformers, 32 texts per batch.

    Args:
        texts: number of texts.
        by_length: sort texts by length first, as sentence-transformers does.
    """
    torch = _torch()
    import transformers

    folder, sample = data.recipes.minilm(), data.texts(texts)
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def turn():
        real = padded = 0
        ordered = sorted(sample, key=len, reverse=True) if by_length else sample
        for start in range(0, len(ordered), _BATCH_TEXTS):
            batch = tokenizer(
                ordered[start : start + _BATCH_TEXTS],
                padding=True,
                truncation=True,
                max_length=_MOST_TOKENS,
                return_tensors="pt",
            )
            real += int(batch["attention_mask"].sum())
            padded += batch["input_ids"].numel()
            mask = batch["attention_mask"][:, :, None].float()
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            torch.nn.functional.normalize(mean).numpy()
        return {"texts": len(sample), "real_tokens": real, "padded_tokens": padded}

    return turn


def _grouped(tokens: int, cache: str | pathlib.Path) -> Any:
    """Return the articles as blocks of ids, as transformers' examples/pytorch/run_mlm.py does."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = _tokenizer(load(data.vocabulary()))
    options = {"batched": True, "num_proc": _cores()}
    texts = datasets.load_dataset(
        "json", data_files=str(data.articles()), split="train", cache_dir=str(cache)
    )
    ids = texts.map(
        lambda batch: tokenizer(batch["text"], return_special_tokens_mask=True),
        remove_columns=texts.column_names,
        **options,
    )

    def group_texts(batch):
        joined = {name: list(itertools.chain(*lists)) for name, lists in batch.items()}
        total = len(joined["input_ids"]) // tokens * tokens
        return {
            name: [values[i : i + tokens] for i in range(0, total, tokens)]
            for name, values in joined.items()
        }

    return ids.map(group_texts, **options)


def prepare() -> Turn:
    """Convert text to blocks on disk with datasets, without sentence pairs."""
    text = data.articles()

    def turn():
        with data.temporary() as cache:
            blocks = len(_grouped(128, cache))
        return {"text_bytes": text.stat().st_size, "real_tokens": 128 * blocks}

    return turn


def loader(tokens: int, batch: int, steps: int) -> Turn:
    """Read shuffled, masked batches of the blocks with PyTorch's DataLoader, in this process."""
    torch = _torch()
    blocks = _grouped(tokens, data.scratch())
    collator = _collator(load(data.vocabulary()), 0.15)

    def shuffled():
        while True:
            yield from torch.utils.data.DataLoader(
                blocks, batch, shuffle=True, drop_last=True, collate_fn=collator
            )

    stream = shuffled()

    def turn():
        collated = list(itertools.islice(stream, steps))
        return {"rows": steps * batch, "real_tokens": sum(x["input_ids"].numel() for x in collated)}

    return turn


def _state(size: str) -> tuple[Any, Any]:
    """Return a model and its optimizer with initialized moments."""
    torch = _torch()
    config = data.pretraining(size, 128, 8)
    config.model.vocab_size = len(load(data.vocabulary()))
    model = build(config.model, config.model.positions)
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _write(path: pathlib.Path, model: Any, optimizer: Any) -> None:
    import torch

    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def save(size: str) -> Turn:
    """Save model and optimizer durably with torch.save."""
    (model, optimizer), path = _state(size), data.scratch() / "state.pt"

    def turn():
        _write(path, model, optimizer)
        return {"bytes": path.stat().st_size}

    return turn


def restore(size: str) -> Turn:
    """Load model and optimizer with torch.load."""
    torch = _torch()
    (model, optimizer), path = _state(size), data.scratch() / "state.pt"
    _write(path, model, optimizer)

    def turn():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return {"bytes": path.stat().st_size}

    return turn


def start(size: str, tokens: int, batch: int, compiled: bool, cached: bool) -> Turn:
    """Run a process until its first step (first_step.py), with one sequence per row.

    Args:
        size, tokens, batch: as in `ours.start`.
        compiled: use torch.compile.
        cached: reuse the compiled programs of an earlier process.
    """
    torch = _torch()
    config = data.pretraining(size, tokens, batch)
    vocabulary = load(data.vocabulary())
    config.model.vocab_size = len(vocabulary)
    model = build(config.model, config.model.positions)
    rows = batches(RowDataset(data.rows(tokens, 1), "train"), batch, config.seed, 0, 1)
    collator = _collator(vocabulary, config.masking.rate)
    step_inputs = inputs(next(iter(rows)), config.model.segments, collator)
    path = data.scratch() / "first_step.pt"
    arrays = {name: step_inputs[name] for name in (*_ENCODER, "labels", "next_sentence_label")}
    torch.save({"config": model.config.to_dict(), "inputs": arrays}, path)
    command = [sys.executable, data.HERE / "first_step.py", path]

    def turn():
        with tempfile.TemporaryDirectory() as cache:
            cache_variables = {} if cached else {"TORCHINDUCTOR_CACHE_DIR": cache}
            begun = time.perf_counter()
            process = subprocess.Popen(
                [*command, *(["--compile"] if compiled else [])],
                env={**os.environ, **cache_variables}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            output = process.stdout.readline()
            seconds = time.perf_counter() - begun
            process.kill()
            process.communicate()
        if not output:
            raise RuntimeError("transformers did not complete its first step")
        return {"seconds": seconds}

    return turn
