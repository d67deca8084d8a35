"""Pretrain, fine-tune and analyze BERT in JAX.

`bert_jax.load(SOURCE)` opens a model; `pretrain` and `finetune` train one (`bert_jax.api`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_jax.api import Model, Output, Prediction, UserError, finetune, load, mteb, pretrain

__all__ = ["Model", "Output", "Prediction", "UserError", "finetune", "load", "mteb", "pretrain"]

# pyproject.toml reads it from here, so that a checkout that is not installed has a version too.
__version__ = "0.2.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    # The command line starts without JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bert_jax import api

    return getattr(api, name)
