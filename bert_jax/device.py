"""The accelerator: choosing it, its data sheet, and the cache of compiled programs."""

import ctypes
import importlib.util
import os
import pathlib
import pkgutil
from typing import NamedTuple

import jax

from bert_jax.config import Run
from bert_jax.errors import UserError

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_RETENTION = 3  # bytes that glibc may keep for each byte of a program's temporaries
_compiled: list[int] = []  # temporaries of the programs of this process
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_DETERMINISTIC = "xla_gpu_deterministic_ops"


class Chip(NamedTuple):
    """What one device can do, from its maker's data sheet: a chip, or half of a TPU7x.

    Attributes:
        flops: dense bfloat16 FLOP/s.
        memory_bytes: what a program may take.
        memory_bandwidth: bytes/s of main memory.
        link_bandwidth: bytes/s one way of a link to a neighbor (TPU) or to the node's switch (GPU).
        network_bandwidth: bytes/s one way of a device's share of the network between slices or
            nodes; 0 if unknown.
        source: of all of these.
    """

    flops: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    source: str


_GIB = 2**30
_CLOUD = "docs.cloud.google.com/tpu/docs"
# A TPU's memory is what libtpu's compiler reports as available (0.0.42; 0.0.50 for TPU7x); a link's
# bandwidth is the chip's divided by its ports and, where it is given for both directions, by 2.
_V5P = Chip(
    459e12,
    int(95.74 * _GIB),
    2765e9,
    100e9,
    6.25e9,
    f"{_CLOUD}/v5p: 1,200 GB/s both ways over 6 links; 50 Gbit/s between slices",
)
# By what `device_kind` begins with.
CHIPS = {
    "TPU v4": Chip(
        275e12,
        int(30.75 * _GIB),
        1200e9,
        50e9,
        0.0,
        f"{_CLOUD}/v4; links: Jouppi et al., arXiv 2304.01964, table 4",
    ),
    "TPU v5 lite": Chip(
        197e12,
        int(15.75 * _GIB),
        819e9,
        50e9,
        3.125e9,
        f"{_CLOUD}/v5e: 400 GB/s both ways over 4 links; 6.4 Tbit/s a pod of 256 between slices",
    ),
    "TPU v5p": _V5P,
    "TPU v5": _V5P,
    "TPU v6 lite": Chip(
        918e12,
        int(31.25 * _GIB),
        1638e9,
        100e9,
        12.5e9,
        f"{_CLOUD}/v6e: 800 GB/s both ways over 4 links; 4 x 200 Gbit/s a host of 8 between slices",
    ),
    # One of the two devices of a chip: half of its compute, memory and bandwidth.
    "TPU7x": Chip(
        2307e12 / 2,
        int(94.74 * _GIB),
        7380e9 / 2,
        50e9,
        6.25e9,
        f"{_CLOUD}/tpu7x: two devices a chip; a chip has 2,307 TFLOP/s, 7,380 GB/s, 1,200 GB/s both "
        "ways over 6 links, and 100 Gbit/s between slices",
    ),
    "NVIDIA A100": Chip(
        312e12,
        80 * 10**9,
        2039e9,
        300e9,
        25e9,
        "NVIDIA A100 80GB SXM data sheet; DGX A100: 8 x 200 Gbit/s a node",
    ),
    "NVIDIA H100": Chip(
        989e12,
        80 * 10**9,
        3350e9,
        450e9,
        50e9,
        "NVIDIA H100 SXM data sheet; DGX H100: 8 x 400 Gbit/s a node",
    ),
    "NVIDIA H200": Chip(
        989e12,
        141 * 10**9,
        4800e9,
        450e9,
        50e9,
        "NVIDIA H200 SXM data sheet; DGX H200: 8 x 400 Gbit/s a node",
    ),
    "NVIDIA B200": Chip(
        2250e12,
        180 * 10**9,
        8000e9,
        900e9,
        50e9,
        "NVIDIA HGX B200 data sheet, without sparsity; DGX B200: 8 x 400 Gbit/s a node",
    ),
    "NVIDIA L4": Chip(
        121e12,
        24 * 10**9,
        300e9,
        32e9,
        1.5625e9,
        "NVIDIA L4 data sheet, without sparsity; PCIe 4.0 x16; g2-standard-96: 8 a node, 100 Gbit/s",
    ),
}


def start(platform: str, cache: bool = True, deterministic: bool = False) -> None:
    """Choose the platform, turn on the compilation cache and set XLA's flags.

    Call it before JAX is used. Compiled programs are kept in `$BERT_JAX_CACHE`, or
    `~/.cache/bert_jax`, so a restart of an unchanged run does not compile again.

    Args:
        platform: "cpu", "gpu" or "tpu"; "" takes the best there is.
        cache: False for programs of hardware that is not here, which cannot be read back.
        deterministic: have XLA use deterministic kernels on a GPU. A setting of that flag in
            `$XLA_FLAGS` takes precedence.

    Raises:
        UserError: a platform was named that is not there.
    """
    folder = os.environ.get("BERT_JAX_CACHE") or pathlib.Path.home() / ".cache" / "bert_jax"
    jax.config.update("jax_compilation_cache_dir", str(folder) if cache else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if _only_cpu():
        _keep_memory()
        use_fast_products()
    elif deterministic and _may_use_gpu():
        _add_xla_flag(_DETERMINISTIC, "true")
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


def _platforms() -> str:
    """The platforms that JAX is told to use, separated by commas; "" leaves it the choice."""
    return jax.config.jax_platforms or ""


def _plugins() -> list[str]:
    """The installed modules that bring JAX an accelerator."""
    spec = importlib.util.find_spec("jax_plugins")
    paths = spec.submodule_search_locations if spec else []
    names = [module.name for module in pkgutil.iter_modules(paths)]
    return names + ["libtpu"] * bool(importlib.util.find_spec("libtpu"))


def _only_cpu() -> bool:
    """Whether JAX will look for no accelerator: it is told to, or has no plugin for one."""
    return _platforms() == "cpu" if _platforms() else not _plugins()


def _may_use_gpu() -> bool:
    """Whether JAX may choose a GPU."""
    candidates = _platforms().split(",") if _platforms() else _plugins()
    return any(kind in name for name in candidates for kind in ("cuda", "rocm", "gpu"))


def _keep_memory() -> None:
    """Lets glibc keep what is freed, for the next step wants as much again.

    XLA allocates a step's temporaries anew for every step. glibc would take them from the system and
    give them back each time, which then has to clear every page: a good part of a small step's time.
    Threads share one arena, for the others cannot hold blocks of that size.
    """
    _tell_malloc({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def limit_malloc_retention(temporary_bytes: int) -> None:
    """Let glibc return freed memory to the system once the process's programs need much of it.

    What glibc keeps is fragmented and can grow to three times a program's temporaries; blocks of one
    program rarely fit into the holes that another leaves. Call this for every program compiled.

    Args:
        temporary_bytes: the temporaries of the program.
    """
    _compiled.append(temporary_bytes)
    if not _only_cpu() or _RETENTION * sum(_compiled) < _memory_bytes() / 2:
        return
    # Larger blocks are mapped one by one and returned when they are freed.
    _tell_malloc({_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 20})


def _memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _tell_malloc(settings: dict[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for name, value in settings.items():
        mallopt(name, value)


def use_fast_products() -> None:
    """Has XLA compute a CPU's matrix products with Eigen, and reductions only with YNNPACK.

    JAX 0.10 to 0.12 have YNNPACK do both, whose products use a second core badly; what that costs
    depends on how busy the machine is (`products` in experiments/speed). To be called before any
    program is compiled; if `$XLA_FLAGS` says something of it already, that stays. JAX ends the
    process for flags that it does not know: look again when pyproject.toml lets a newer one in.
    """
    _add_xla_flag(_YNNPACK, "LIBRARY_FUSION_TYPE_REDUCE")


def _add_xla_flag(name: str, value: str) -> None:
    """Add a flag to `$XLA_FLAGS`, which XLA reads once, unless the user has set it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


def check_deterministic(config: Run, platform: str) -> None:
    """Refuse to train on a GPU without the flag that `config.deterministic` promises.

    Raises:
        UserError: `start` was not called with `deterministic`, or `$XLA_FLAGS` contradicts it.
    """
    if platform != "gpu" or not config.deterministic:
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    values = [flag for flag in flags if flag.partition("=")[0] == f"--{_DETERMINISTIC}"]
    if not values or values[-1].partition("=")[2].lower() not in ("", "true", "1"):
        raise UserError(
            f"config.deterministic is true, but $XLA_FLAGS lacks --{_DETERMINISTIC}=true: set it "
            "before JAX starts (bert_jax.device.start does), or config.deterministic to false"
        )


def peak_flops() -> float | None:
    """bfloat16 FLOP/s of one device, None where nobody has looked it up (any CPU)."""
    found = chip(jax.devices()[0].device_kind)
    return found.flops if found else None


def chip(kind: str) -> Chip | None:
    """The data sheet of a `device_kind`, None where nobody has looked it up (any CPU)."""
    return next((chip for name, chip in CHIPS.items() if kind.startswith(name)), None)
