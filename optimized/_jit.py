"""How the CPU kernels are compiled, and the names of their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from numba import njit
from numpy.typing import NDArray

# Numba infers the types inside a kernel; these names tell a reader what it finds.
Int: TypeAlias = Any
Int32Array: TypeAlias = NDArray[Any]
Int64Array: TypeAlias = NDArray[Any]
Uint64Array: TypeAlias = NDArray[Any]

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile at the first call, release the GIL, keep the result on disk where a place is writable.

    What is kept is renewed when the kernel's own file changes, and not when another one does: a kernel calls
    only functions of its own file.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither beside the source nor in the user's cache folder
        return njit(nogil=True)(function)
