"""Tuning for CPUs: matrix products, memory allocation and garbage collection."""

import contextlib
import ctypes
import functools
import gc
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Options of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_RETENTION = 3  # bytes that glibc may retain per byte of a program's temporaries
_is_retaining = False
_temporary_bytes: list[int] = []  # temporaries of each program compiled in this process


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense_product(x: Array, kernel: Array, dimensions: Any) -> Array:
    """Contract the last axes of x with the first axes of the kernel, as a dense layer does.

    On other platforms than CPU, value and gradients are those of `jax.lax.dot_general`.
    """
    return jax.lax.dot_general(x, kernel, dimensions)


def _dense_product_forward(x, kernel, dimensions):
    return dense_product(x, kernel, dimensions), (x, kernel)


def _dense_product_backward(dimensions, residuals, grad):
    (x, kernel), num_inputs = residuals, len(dimensions[0][0])
    batch_axes, num_outputs = range(x.ndim - num_inputs), kernel.ndim - num_inputs

    def kernel_grad(x, grad):
        return jax.lax.dot_general(x, grad, ((batch_axes, batch_axes), ((), ())))

    def transposed_kernel_grad(x, grad):
        # XLA's CPU backend copies the first operand to transpose it, so put the narrower one first.
        # Without the barrier XLA swaps the operands back and finds no fast matrix product.
        transposed = jax.lax.optimization_barrier(kernel_grad(grad, x))
        return jnp.moveaxis(transposed, range(num_outputs), range(-num_outputs, 0))

    is_wide = math.prod(kernel.shape[:num_inputs]) > math.prod(kernel.shape[num_inputs:])
    cpu_kernel_grad = transposed_kernel_grad if is_wide else kernel_grad
    axes = (range(len(batch_axes), grad.ndim), range(num_inputs, kernel.ndim))
    return (
        jax.lax.dot_general(grad, kernel, (axes, ((), ()))),
        jax.lax.platform_dependent(x, grad, cpu=cpu_kernel_grad, default=kernel_grad),
    )


dense_product.defvjp(_dense_product_forward, _dense_product_backward)


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

    Args:
        temporary_bytes: size of the program's temporaries.
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
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for name, value in options.items():
        mallopt(name, value)


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
