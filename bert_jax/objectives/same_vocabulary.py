"""Whether rows or a teacher have the vocabulary of a model."""

import shlex
from typing import Any

from bert_jax.data import rows
from bert_jax.errors import UserError

# Settings of rows that are arguments of `bert-jax prepare`.
_PREPARE = (
    *("tokens", "sequences", "pairs", "passes", "seed"),
    *("heldout_fraction", "short_fraction", "language"),
)


def check_vocabulary(where: str, folder: str, vocabulary: Any, init: str) -> None:
    """Refuse rows that were prepared with another vocabulary, or with other settings of it.

    Args:
        where: what an error begins with.
        folder: folder of the rows.
        vocabulary: vocabulary of the model.
        init: the model.
    """
    manifest = rows.read_manifest(folder)
    settings = vocabulary.settings
    prepared = {name: manifest.settings.get(name) for name in settings}
    if manifest.vocab_sha256 != vocabulary.sha256:
        problem = "another vocabulary than that"
    elif effective_settings(prepared) != effective_settings(settings):
        problem = "other settings of the vocabulary than those"
    else:
        return
    options = [
        part
        for key in _PREPARE
        if key in manifest.settings
        for part in (f"--{key.replace('_', '-')}", str(manifest.settings[key]))
    ]
    out = f"{folder.rstrip('/')}-{init.rstrip('/').rpartition('/')[2]}"
    sources = manifest.settings.get("sources", [])
    command = ["bert-jax", "prepare", "--vocab", init, "--out", out, *options, *sources]
    raise UserError(
        f"{where} was prepared with {problem} of {init}: prepare the text again, and pass the "
        f"new --rows: {shlex.join(command)}"
    )


def effective_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with `strip_accents` resolved, which None leaves to `lowercase`."""
    if settings.get("strip_accents", "") is None:
        return {**settings, "strip_accents": settings["lowercase"]}
    return settings
