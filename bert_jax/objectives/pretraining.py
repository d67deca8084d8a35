"""The phases of a pretraining run: its rows, their checks, and the objective of each phase."""

import copy
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bert_jax.config.schema import Config, model_at, phase_ends
from bert_jax.data import mixture, rows
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.loader import Batch, RowDataset, batches, heldout_batches, row_indices
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.objectives import distillation, masking, warm_start
from bert_jax.objectives.base import Objective, Phase, Source
from bert_jax.objectives.causal_lm import CausalLM
from bert_jax.objectives.electra import ReplacedTokens
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import workdir

# Size of BERT's uncased vocabulary.
DEFAULT_VOCAB_SIZE = 30_522


def make_phases(
    config: Config,
    objective: Callable[..., Objective] | None = None,
    start: warm_start.Start | None = None,
    folder: str | os.PathLike = "",
) -> tuple[Config, Vocabulary, list[dict[str, Any]], list[Phase]]:
    """Open the rows of every phase and check that they fit the model and each other.

    Args:
        config: validated config.
        objective: class with the constructor of `MaskedLM`; None for that, or `CausalLM`. Its name
            is recorded with the data, so a run does not resume with another one.
        start: parameters that the run starts from, which are recorded with the data likewise.
        folder: the workdir, if there is one: a run that is resumed keeps its dtype and attention.

    Returns:
        The config with the vocabulary size filled in; the vocabulary; a description of each phase's
        rows for `workdir.write_or_check_config`; the phases.
    """
    config = _with_warmup(config)
    model = config.model
    model.dtype = workdir.dtype_at(config, folder)
    if not (model.masked_lm or model.electra.generator_hidden) or model.head.kind:
        raise UserError(
            "config.model: pretraining needs head.kind='' and masked_lm=True, or electra.generator_hidden above 0 "
            "(ELECTRA)"
        )
    if model.electra.replaced_token and not model.electra.generator_hidden and objective is None:
        raise UserError(
            "config.model.electra.replaced_token is True: it must be false without a generator "
            "(config.model.electra.generator_hidden)"
        )
    skip = _warn if config.damaged_rows == "skip" else None
    phases: list[Phase] = []
    data: list[dict[str, Any]] = []
    if objective is not None and config.distill.teacher:
        raise UserError("config.distill.teacher: it is not supported with an objective of your own")
    teacher = None
    vocabulary: Any = None
    kept = workdir.attention_at(folder) if folder else {}
    rows_read: dict[str, int] = {}  # by digest
    for i, phase_config in enumerate(config.phases):
        folders = phase_config.folders
        if not folders:
            raise UserError(
                f"phase {i} has no rows: add --rows DIR (once per phase, in order) or "
                f"--config.phases[{i}].rows=DIR; `bert-jax prepare` creates them"
            )
        trains, heldouts = (
            [RowDataset(folder, split, skip) for folder in folders]
            for split in ("train", "heldout")
        )
        for dataset in (*trains, *heldouts):
            dataset.verify()
        for place, train in zip(folders, trains, strict=True):
            _check_rows(config, i, place, train.manifest, vocabulary.sha256 if vocabulary else "")
        manifest = _merged(i, folders, [train.manifest for train in trains])
        if vocabulary is None:
            vocabulary = _open_vocabulary(folders[0], manifest, model.segments, i)
        config.model.vocab_size = manifest.vocab_size
        if config.distill.teacher and teacher is None:
            teacher = warm_start.open_teacher(config, vocabulary)
        data.append(_rows_to_dict(manifest))
        if teacher:
            data[-1]["teacher"] = warm_start.params_digest(teacher.params)
        if objective is not None:
            data[-1]["objective"] = getattr(objective, "__qualname__", repr(objective))
        mask_id, continuation = vocabulary.mask_id, vocabulary.continuation()
        implementation = attention.resolve(config, manifest.tokens, kept)
        phase = _phase(
            config, i, manifest.format, implementation, mask_id, continuation, objective, teacher
        )
        # Phases on the same rows, such as for a batch-size warm-up, continue their epoch.
        used = [rows_read.get(train.manifest.digest, 0) for train in trains]
        count = phase.batch_size * (phase.end_step - phase.first_step)
        held = [
            # No more rows than one accumulation part, which is known to fit the device.
            functools.partial(
                heldout_batches,
                heldout,
                phase.batch_size // phase.accumulation,
                config.evaluate_rows,
            )
            for heldout in heldouts
        ]
        train, offset, read = trains[0], used[0], [used[0] + count]
        sources: dict[str, Source] = {}
        if phase_config.mixture:
            weights = [source.weight for source in phase_config.mixture]
            train, offset = (
                mixture.Mixture(
                    trains, weights, config.mixture_temperature, used, config.mixture_repeats
                ),
                0,
            )
            read = train.rows_before(count).tolist()
            epochs = [(n - m) / len(x) for n, m, x in zip(read, used, trains, strict=True)]
            each = map(Source, train.shares.tolist(), epochs, held)
            sources = dict(zip(_names(folders), each, strict=True))
        order = (train, phase.batch_size, config.seed)
        phases.append(
            dataclasses.replace(
                phase,
                batches=_scheduled(
                    config,
                    phase,
                    manifest.tokens,
                    functools.partial(batches, *order, offset=offset),
                ),
                row_indices=functools.partial(row_indices, *order, offset=offset),
                heldout=phase.heldout if sources else held[0],
                sources=sources,
            )
        )
        rows_read |= {x.manifest.digest: n for x, n in zip(trains, read, strict=True)}
    if start is not None:
        data[0] |= start.to_dict()
    return config, vocabulary, data, phases


def _merged(i: int, folders: list[str], manifests: list[rows.Manifest]) -> rows.Manifest:
    """Return the manifest of all folders of phase i."""
    where = f"phase {i}: {', '.join(folders)}"
    if len({*folders}) < len(folders):
        raise UserError(
            f"{where}: a folder occurs twice; give it once, with the sum of the weights"
        )
    return mixture.merged(manifests, where)


def _names(folders: list[str]) -> list[str]:
    """Return names of folders for metrics: the last part of each path, with its number if that is not unique."""
    names = [re.sub(r"[^\w.-]", "_", x.rstrip("/").rpartition("/")[2]) for x in folders]
    return [x if names.count(x) == 1 else f"{x}_{i}" for i, x in enumerate(names)]


def _open_vocabulary(folder: str, manifest: rows.Manifest, segments: int, i: int) -> Vocabulary:
    """Open the vocabulary of the rows of phase i, and check that they were prepared with it."""
    vocabulary = vocabularies.load(folder)
    if vocabulary.sha256 != manifest.vocab_sha256:
        raise UserError(
            f"phase {i}: {folder}: {vocabulary.file} is not the vocabulary that its rows were "
            "prepared with: restore that file, or prepare the rows again"
        )
    try:
        vocabularies.check_segments(vocabulary, segments)
    except UserError as error:  # single sequences are the same
        _warn(str(error))
    return vocabulary if vocabulary.is_wordpiece else vocabulary.resized(manifest.vocab_size)


def _with_warmup(config: Config) -> Config:
    """Return a copy of a config with the steps of `warmup_fraction` filled in."""
    config = copy.deepcopy(config)
    if config.warmup_fraction:
        config.optim.warmup_steps = round(config.warmup_fraction * config.steps)
    return config


def _warn(line: str) -> None:
    """Warn in every process: each reads rows that no other process reads."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


def abstract_phases(
    config: Config, sequences: int, implementation: Callable[[int], str] | None = None
) -> tuple[Config, list[Phase]]:
    """Return phases of the shapes that `make_phases` would give, to compile on a machine without data.

    If a phase names rows, their manifest gives T, S and the vocabulary size.

    Args:
        config: validated config.
        sequences: S of the phases that name no rows.
        implementation: maps T to the implementation of attention; None for that of the config.

    Returns:
        The config with the vocabulary size filled in (`DEFAULT_VOCAB_SIZE` if unknown), and the
        phases, without batches.
    """
    config = _with_warmup(config)
    manifests = [
        _merged(i, phase.folders, [*map(rows.read_manifest, phase.folders)])
        if phase.folders
        else None
        for i, phase in enumerate(config.phases)
    ]
    vocab_sizes = [manifest.vocab_size for manifest in manifests if manifest]
    for i, manifest in enumerate(manifests):
        if manifest:
            _check_rows(config, i, ", ".join(config.phases[i].folders), manifest, "")
        elif not config.phases[i].tokens:
            raise UserError(
                f"phase {i} has neither rows nor tokens: set --config.phases[{i}].tokens=128"
            )
    config.model.vocab_size = config.model.vocab_size or (vocab_sizes or [DEFAULT_VOCAB_SIZE])[0]
    teacher = warm_start.open_teacher(config, None) if config.distill.teacher else None
    vocab_size, phases = config.model.vocab_size, []
    for i in range(len(config.phases)):
        default_format = rows.RowFormat(config.phases[i].tokens, sequences, vocab_size)
        manifest = manifests[i]
        row_format = manifest.format if manifest else default_format
        continuation = np.zeros(vocab_size, bool)
        name = implementation(row_format.tokens) if implementation else config.model.attention
        phases.append(_phase(config, i, row_format, name, 0, continuation, None, teacher))
    return config, phases


def _phase(
    config: Config,
    i: int,
    row_format: rows.RowFormat,
    implementation: str,
    mask_id: int,
    continuation: np.ndarray,
    objective: Callable[..., Objective] | None = None,
    teacher: warm_start.Teacher | None = None,
) -> Phase:
    """Return phase i with an implementation of attention, without batches."""
    phase_config, (first, end) = config.phases[i], [0, *phase_ends(config)][i : i + 2]
    if phase_config.rope_theta and config.model.position_kind != "rope":
        raise UserError(
            f"config.phases[{i}].rope_theta is {phase_config.rope_theta}: it must be 0 with "
            f"config.model.position_kind={config.model.position_kind!r}"
        )
    model = dataclasses.replace(model_at(config, end), attention=implementation)
    config = dataclasses.replace(config, model=model)
    if objective is None and teacher:
        objective = distillation.objective(config, teacher)
    if objective is None:
        objective = CausalLM if config.model.causal else MaskedLM
        if config.model.electra.generator_hidden:
            objective = ReplacedTokens
    batch_size = phase_config.batch_size or config.batch_size
    empty = row_format.decode(row_format.encode(row_format.seal(row_format.empty(1))))
    if config.masking.final_rate:
        empty["num_predictions"] = np.zeros((1, row_format.sequences), np.int32)
    return Phase(
        objective=objective(config.model, config.masking, row_format, mask_id, continuation),
        tokens=row_format.tokens,
        batch_size=batch_size,
        accumulation=phase_config.accumulation or config.accumulation,
        batch_shape={
            name: jax.ShapeDtypeStruct((batch_size, *value.shape[1:]), value.dtype)
            for name, value in empty.items()
        },
        first_step=first,
        end_step=end,
        batches=lambda *_: iter(()),
        row_indices=lambda _: [],
        heldout=lambda *_: iter(()),
    )


def _scheduled(
    config: Config, phase: Phase, tokens: int, batches: Callable[..., Iterator[Batch]]
) -> Callable[..., Iterator[Batch]]:
    """Add "num_predictions" [B, S] to the batches if the masking rate depends on the step."""
    if not config.masking.final_rate:
        return batches

    def scheduled(first: int, end: int, process: int, processes: int) -> Iterator[Batch]:
        for step, batch in enumerate(
            batches(first, end, process, processes), phase.first_step + first
        ):
            rate = config.masking.rate_at(step, config.steps)
            counts = masking.prediction_counts(config.masking, tokens, rate)
            yield {**batch, "num_predictions": counts[batch["length"]]}

    return scheduled


def _rows_to_dict(manifest: rows.Manifest) -> dict[str, Any]:
    """Return a digest of the rows and the part of their manifest that says how they were made."""
    description = manifest.to_dict()
    del description["length_histogram"]
    for split in ("train", "heldout"):
        del description[split]["shards"]
    return {"digest": manifest.digest, **description}


def _check_rows(
    config: Config, i: int, folder: str, manifest: rows.Manifest, vocab_sha256: str
) -> None:
    phase, model = config.phases[i], config.model
    where = f"phase {i}: {folder}"
    if phase.tokens and manifest.tokens != phase.tokens:
        raise UserError(
            f"{where} has rows of T={manifest.tokens}, but config.phases[{i}].tokens is "
            f"{phase.tokens}"
        )
    if manifest.tokens > model.positions:
        raise UserError(
            f"{where} has rows of T={manifest.tokens}, but config.model.positions is "
            f"{model.positions}"
        )
    if model.vocab_size not in (0, manifest.vocab_size):
        raise UserError(
            f"{where} has a vocabulary of {manifest.vocab_size}, but config.model.vocab_size is "
            f"{model.vocab_size}: set it to 0 to take the vocabulary of the rows"
        )
    if vocab_sha256 and manifest.vocab_sha256 != vocab_sha256:
        raise UserError(
            f"{where} was prepared with another vocabulary than {config.phases[0].folders[0]}"
        )
    if model.next_sentence and manifest.pairs != "nsp":
        raise UserError(
            f"{where} has no sentence pairs: use `bert-jax prepare --pairs nsp`, or train with "
            "--config.model.next_sentence=false"
        )
    if not manifest.train.rows:
        raise UserError(f"{where} has no training rows")
