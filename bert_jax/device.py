"""The accelerator: choosing it, its peak, and the cache of compiled programs."""

import os
import pathlib

import jax

from bert_jax.errors import UserError

# Dense bfloat16 FLOP/s a device by what `device_kind` begins with, from the vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def start(platform: str) -> None:
    """Chooses the platform ("" takes the best there is) and turns on the compilation cache.

    Compiled programs are kept in `$BERT_JAX_CACHE`, or `~/.cache/bert_jax`, so a restart of an
    unchanged run does not compile again.

    Raises:
        UserError: a platform was named that is not there.
    """
    cache = os.environ.get("BERT_JAX_CACHE") or pathlib.Path.home() / ".cache" / "bert_jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that some backend was found
        if not platform:
            raise
        extra = {"gpu": "cuda", "tpu": "tpu"}.get(platform)
        advice = f"install bert-jax[{extra}] on a machine that has one, or " if extra else ""
        raise UserError(
            f"config.platform is {platform!r} and JAX finds no such device here: {advice}"
            "leave it at '' to take what there is"
        ) from error


def peak_flops() -> float | None:
    """bfloat16 FLOP/s of one device, None where nobody has looked it up (any CPU)."""
    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), None)
