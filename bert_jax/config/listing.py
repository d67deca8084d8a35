"""All settings with their defaults and what they mean, which the comments above them in config/ say."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bert_jax.config.fields import flatten, groups
from bert_jax.config.flags import DERIVED
from bert_jax.config.schema import Config, FinetuneConfig, TrainConfig

# Those that `bert-jax config` lists without --all, besides those that the config changes.
USUAL = {
    *("steps", "epochs", "batch_size", "accumulation", "seed", "evaluate_every_steps"),
    *("optim.optimizer", "optim.learning_rate", "optim.warmup_steps", "optim.weight_decay"),
    *("model.layers", "model.hidden", "model.heads", "model.dropout", "model.dtype"),
    *("masking.rate", "masking.whole_word", "warmup_fraction", "checkpoint.every_steps"),
    *("task.train", "task.dev", "task.test", "task.text_a", "task.text_b", "task.label"),
    *("task.tokens", "lora.rank", "trackers"),
}


class Setting(NamedTuple):
    key: str
    value: Any
    default: Any
    help: str


class Group(NamedTuple):
    key: str
    help: str
    settings: list[Setting]


def groups_of(config: TrainConfig, chosen: Callable[[Setting], bool]) -> Iterator[Group]:
    """Yield the groups of settings of a config, with those settings that are chosen."""
    values, defaults, help = flatten(config), flatten(type(config)()), {}
    for prefix, group in groups(config):
        help |= {prefix + name: text for name, text in _comments(type(group)).items()}
        keys = [prefix + field.name for field in dataclasses.fields(group)]
        settings = [
            Setting(key, values[key], defaults.get(key, values[key]), help.get(key, ""))
            for key in keys
            if key in values and not (isinstance(config, FinetuneConfig) and key in DERIVED)
        ]
        about = [inspect.getdoc(group) or "", help.get(re.sub(r"(\[\d+\])?\.$", "", prefix), "")]
        if settings := [*filter(chosen, settings)]:
            yield Group(f"config.{prefix}"[:-1], " ".join(" ".join(about).split()), settings)


def defaults(chosen: Callable[[Setting], bool] = lambda _: True) -> Iterator[Group]:
    """Yield the groups of pretraining, then those settings in which fine-tuning differs."""
    yield from groups_of(Config(), chosen)
    shared = flatten(Config()).items()
    for group in groups_of(FinetuneConfig(), lambda x: (x[:2] not in shared) and chosen(x)):
        yield group._replace(key=f"Fine-tuning: {group.key}")


@functools.cache
def _comments(kind: type) -> dict[str, str]:
    """Return the comment above each field of a dataclass, else above the field that it overrides."""
    comments, lines = {}, []
    for base in reversed(kind.__mro__[:-1]):
        for line in inspect.getsource(base).splitlines():
            if comment := re.match(r"    # (.*)", line):
                lines.append(comment[1])
            else:
                if lines and (field := re.match(r"    (\w+): ", line)):
                    comments[field[1]] = " ".join(lines)
                lines = []
    return comments
