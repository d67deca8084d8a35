"""Fields of configs with constraints beside them; configs as plain values and by dotted path."""

import copy
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def one_of(default: str, *others: str) -> Any:
    """A field with a fixed set of values."""
    choices = (default, *others)
    requirement = "one of " + ", ".join(map(repr, choices))
    return constrained(default, requirement, lambda value: value in choices)


def positive(default: int | float, limit: int | float = math.inf) -> Any:
    requirement = "above 0" if limit == math.inf else f"1 to {limit:,}"
    return constrained(default, requirement, lambda value: 0 < value <= limit)


def not_negative(default: int | float, limit: int | float = math.inf) -> Any:
    requirement = "0 or more" if limit == math.inf else f"0 to {limit:,}"
    return constrained(default, requirement, lambda value: 0 <= value <= limit)


def below_one(default: int | float) -> Any:
    return constrained(default, "in [0, 1)", lambda value: 0 <= value < 1)


def fraction(default: float) -> Any:
    return constrained(default, "in (0, 1]", lambda value: 0 < value <= 1)


def constrained(default: Any, requirement: str, holds: Callable[[Any], bool]) -> Any:
    metadata = {"requirement": requirement, "holds": holds}
    return dataclasses.field(default=default, metadata=metadata)


def with_fields(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a config with fields changed by their dotted path, as `{"head.kind": "token"}`."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *groups, name = path.split(".")
        group = functools.reduce(getattr, groups, config)
        getattr(group, name)  # raises for an unknown field
        setattr(group, name, value)
    return config


def flatten(config: Any) -> dict[str, Any]:
    """Return the leaves by dotted path: `optim.learning_rate`, `phases[0].rows`."""
    return {path: value for path, _, value in leaves(config)}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield the dotted path, field and value of every leaf."""
    for path, group in groups(config, prefix):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if not any(map(dataclasses.is_dataclass, _items("", value).values())):
                yield f"{path}{field.name}", field, value


def groups(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the config, and every dataclass in it, with the prefix of the paths of its fields."""
    yield prefix, config
    for field in dataclasses.fields(config):
        items = _items(f"{prefix}{field.name}", getattr(config, field.name))
        for path, item in items.items():
            if dataclasses.is_dataclass(item):
                yield from groups(item, f"{path}.")


def _items(path: str, value: Any) -> dict[str, Any]:
    """Return the items of a tuple by their paths; of another value itself."""
    is_tuple = isinstance(value, tuple)
    return {f"{path}[{i}]": x for i, x in enumerate(value)} if is_tuple else {path: value}


def to_dict(config: Any) -> dict[str, Any]:
    """Return nested plain values, as stored in config.json."""
    return dataclasses.asdict(config)


def build(kind: Any, value: Any, where: str) -> Any:
    """Invert `dataclasses.asdict`, also after a round trip through JSON.

    Args:
        kind: a dataclass or the type of a field: a plain type, `tuple[kind, ...]` or `Any`.
        value: plain values.
        where: what to call the value in error messages.

    Raises:
        ValueError: a value has the wrong type, or a field is missing or unknown; names the field.
    """
    if kind is Any:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        for name in {**value, **fields}:
            if name not in fields:
                raise ValueError(f"{where} has an unknown field {name!r}")
            if name not in value:
                raise ValueError(f"{where} has no field {name!r}")
        return kind(
            **{name: build(fields[name], v, f"{where}.{name}") for name, v in value.items()}
        )
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        item = typing.get_args(kind)[0]
        return tuple(build(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    fits = isinstance(value, typing.get_origin(kind) or kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(
            f"{where} is {str(value)[:80]!r}: it must be {_KINDS.get(kind, 'a group')}"
        )
    return value


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
