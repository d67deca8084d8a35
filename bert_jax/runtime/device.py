"""Platform selection, XLA flags and tuning of CPUs."""

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import os
import pathlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import jax

from bert_jax.config.schema import TrainConfig
from bert_jax.errors import UserError, install_command

_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_DETERMINISTIC = "xla_gpu_deterministic_ops"
_DEVICES = pathlib.Path("/dev")
# Options of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_RETENTION = 3  # bytes that glibc may retain per byte of a program's temporaries
_is_retaining = False
_temporary_bytes: list[int] = []  # temporaries of each program compiled in this process


def start(platform: str, cache: bool = True, deterministic: bool = False) -> None:
    """Select the platform, enable the compilation cache and set XLA flags.

    Call this before JAX is used. Compiled programs are cached in `$BERT_JAX_CACHE`, or
    `~/.cache/bert_jax`, so restarting an unchanged run does not compile again.

    Args:
        platform: "cpu", "gpu" or "tpu"; "" selects the best one available.
        cache: False when compiling for absent hardware, whose programs cannot be loaded.
        deterministic: use deterministic kernels on GPUs, unless `$XLA_FLAGS` sets that flag.
    """
    folder = os.environ.get("BERT_JAX_CACHE") or str(pathlib.Path.home() / ".cache" / "bert_jax")
    jax.config.update("jax_compilation_cache_dir", folder if cache else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if _only_cpu():
        # Otherwise JAX would try installed plugins for absent accelerators, and print why they fail.
        jax.config.update("jax_platforms", "cpu")
        retain_freed_memory()
        use_eigen_matmul()
    elif deterministic and _may_use_gpu():
        _add_xla_flag(_DETERMINISTIC, "true")
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has a backend
        if not platform:
            raise
        extra = {"gpu": "cuda13", "tpu": "tpu"}.get(platform)
        advice = f"{install_command(extra)} on a machine with one, or " if extra else ""
        raise UserError(
            f"config.platform is {platform!r}, but JAX finds no such device: {advice}set it to ''"
        ) from error


def _platforms() -> str:
    """Return the platforms that JAX is configured to use, comma-separated; "" means any."""
    return jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]


def _installed_plugins() -> list[str]:
    spec = importlib.util.find_spec("jax_plugins")
    paths = spec.submodule_search_locations if spec else []
    return [module.name for module in pkgutil.iter_modules(paths)]


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for NVIDIA GPUs is installed, which compiles for absent ones too."""
    return any("cuda" in name for name in _installed_plugins())


def _plugins() -> list[str]:
    """Return the names of installed modules that add an accelerator of this machine to JAX.

    Those for NVIDIA GPUs and TPUs count only on machines that have one: elsewhere they compile for absent
    ones.
    """
    # Device files of a GPU: nvidia0, or dxg in WSL.
    has_gpu = any(itertools.chain(_DEVICES.glob("nvidia[0-9]*"), _DEVICES.glob("dxg")))
    names = [name for name in _installed_plugins() if has_gpu or "cuda" not in name]
    # Device files of a TPU: accel0, or vfio/0 from v5e on.
    has_tpu = any(itertools.chain(_DEVICES.glob("accel[0-9]*"), _DEVICES.glob("vfio/[0-9]*")))
    return names + ["libtpu"] * bool(importlib.util.find_spec("libtpu") and has_tpu)


def _only_cpu() -> bool:
    """Whether JAX can only use the CPU, because of its configuration or for lack of plugins."""
    return _platforms() == "cpu" if _platforms() else not _plugins()


def _may_use_gpu() -> bool:
    """Whether JAX may choose a GPU."""
    candidates = _platforms().split(",") if _platforms() else _plugins()
    return any(kind in name for name in candidates for kind in ("cuda", "rocm", "gpu"))


def unused_gpu(asked: str, platform: str) -> Iterator[str]:
    """Yield why JAX runs on the CPU if there is an NVIDIA GPU and config.platform, `asked`, is ""."""
    if asked or platform != "cpu" or not any(_DEVICES.glob("nvidia[0-9]*")):
        return
    if _may_use_gpu():
        why = f"JAX cannot start it: check nvidia-smi; for drivers before 580, {install_command('cuda12')}"
    elif platforms := os.environ.get("JAX_PLATFORMS"):
        why = f"$JAX_PLATFORMS is {platforms!r}: unset it"
    elif has_cuda_plugin():
        why = f"JAX is set to use {_platforms()!r} only (jax_platforms)"
    else:
        why = f"JAX's plugin is missing: {install_command('cuda13')}, with Python 3.12 or newer"
    yield f"warning: the GPU of this machine is not used: {why}"


def use_eigen_matmul() -> None:
    """Make XLA use Eigen for matrix products on CPU, and YNNPACK only for reductions.

    JAX 0.10 to 0.12 use YNNPACK for both, whose matrix products make poor use of a second core; the
    cost depends on the load of the machine (`products` in experiments/speed). oneDNN's are faster on
    x86 (`xla_cpu_use_onednn` with `xla_cpu_experimental_onednn_fusion_type`), but JAX 0.12 cannot cache
    such programs on disk. Call this before any program is compiled. XLA aborts on unknown flags, so
    check this one when pyproject.toml allows a newer JAX.
    """
    _add_xla_flag(_YNNPACK, "LIBRARY_FUSION_TYPE_REDUCE")


def retain_freed_memory() -> None:
    """Make glibc retain freed memory, which the next step allocates again.

    XLA allocates its temporaries anew in every step. By default glibc returns them to the system
    each time, which then has to clear every page: a large part of a small step's time. All threads
    share one arena because the others cannot hold blocks of that size.
    """
    global _is_retaining
    _is_retaining = True
    _set_malloc_options({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def limit_malloc_retention(temporary_bytes: int) -> None:
    """Undo `retain_freed_memory` once retaining freed memory could exhaust the machine's.

    Because of fragmentation, glibc may retain up to three times the temporaries of a program, and
    one program rarely reuses the blocks of another. Call this after compiling each program.
    """
    _temporary_bytes.append(temporary_bytes)
    if not _is_retaining or _RETENTION * sum(_temporary_bytes) < _memory_bytes() / 2:
        return
    # Blocks above the threshold are mapped individually and unmapped when freed.
    _set_malloc_options(
        {_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 20}
    )


def _memory_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _set_malloc_options(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        for name, value in options.items():
            ctypes.CDLL(None).mallopt(name, value)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block, which traces and compiles.

    Tracing allocates millions of objects that stay alive. Scanning them for garbage takes a tenth
    of the time of a compilation that hits the cache on disk.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _add_xla_flag(name: str, value: str) -> None:
    """Add a flag to `$XLA_FLAGS`, which XLA reads once, unless it is set already."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


def has_deterministic_kernels() -> bool:
    """Whether `$XLA_FLAGS` selects deterministic kernels on GPUs."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    values = [flag for flag in flags if flag.partition("=")[0] == f"--{_DETERMINISTIC}"]
    return bool(values) and values[-1].partition("=")[2].lower() in ("", "true", "1")


@contextlib.contextmanager
def tracing_for_gpu(deterministic: bool) -> Iterator[dict[str, Any]]:
    """Trace in the block as a process with a GPU would, and give XLA's option for the compilation."""
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} --{_DETERMINISTIC}={str(deterministic).lower()}"
    try:
        yield {_DETERMINISTIC: deterministic}
    finally:
        os.environ["XLA_FLAGS"] = before


@contextlib.contextmanager
def one_line_memory_errors() -> Iterator[None]:
    """Turn JAX's error that the memory of a device is exhausted into a `UserError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"the memory of a device is exhausted ({' '.join(str(error).split())[:200]}): raise "
            "config.accumulation, set config.model.remat, or lower config.batch_size; `bert-jax preflight` "
            "says what fits"
        ) from error


def check(config: TrainConfig, platform: str) -> None:
    """Check that JAX was started as the config asks: its platform, and deterministic kernels on GPUs."""
    if config.platform not in ("", platform):
        raise UserError(
            f"config.platform is {config.platform!r}, but JAX runs on {platform!r}: call "
            f"bert_jax.runtime.device.start({config.platform!r}) before JAX is used, or set it to ''"
        )
    if platform == "gpu" and config.deterministic and not has_deterministic_kernels():
        raise UserError(
            f"config.deterministic is true, but $XLA_FLAGS lacks --{_DETERMINISTIC}=true: call "
            "bert_jax.runtime.device.start('', deterministic=True) before JAX is used, or set "
            "config.deterministic to false"
        )
