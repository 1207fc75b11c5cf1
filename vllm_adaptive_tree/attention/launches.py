"""Launches of compiled kernels without Triton's look-up.

Triton asks every argument at every launch what it is specialized for: 65 us for the two launches of a layer, in place
of 18, while the device attends for less.
"""

# mypy: disable-error-code="import-untyped"

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor
from triton.compiler import CompiledKernel

ALIGNMENT = 16
"""Bytes; Triton compiles one variant for pointers that are so aligned, and one for others."""


class Rest(NamedTuple):
    """Arguments of a launch that follow from its key."""

    integers: tuple[int, ...]
    constants: dict[str, Any]  # constexprs, in the order of the kernel's parameters
    options: dict[str, int]  # number of warps, of stages


class Launches:
    """Compiled kernels, by all that Triton specializes for apart from the alignment of pointers."""

    def __init__(self) -> None:
        self.variants: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __call__(
        self,
        kernel: Any,
        key: Hashable,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        aligned: tuple[Tensor, ...],
        rest: Callable[[], Rest],
    ) -> None:
        """Launch `kernel` over `grid` with the `arguments` and the `rest`.

        Args:
            key: of the kernel, the dtypes of its arguments, and the rest.
            aligned: tensors of the arguments whose alignment is specialized, and not always the same.
        """
        address = 0
        for tensor in aligned:
            address |= tensor.data_ptr()
        variant = None if address % ALIGNMENT else self.variants.get(key)
        if variant is not None:
            compiled, tail = variant
            compiled[grid](*arguments, *tail)
            return
        integers, constants, options = rest()
        compiled = kernel[grid](*arguments, *integers, **constants, **options)
        if isinstance(compiled, CompiledKernel) and not address % ALIGNMENT:  # not in the interpreter
            self.variants[key] = compiled, (*integers, *constants.values())
