"""Keys and values in 4 or 8 bits: rows quantized as they are written, in groups along the head.

A row is quantized once, whether it is text, a tree's node or a stream, and moved as it is on commit: what
others see of a token does not depend on how it came into the buffers. The format is MLX's affine one:
value = code · scale + bias, a scale and a bias per group in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ss_device.errors import UserError

BITS = (4, 8)
GROUP_SIZES = (64, 32)  # by preference; MLX's third, 128, divides no head that 64 does not
WORD = 32  # bits of what codes are packed into


def group_size_for(head_dim: int, bits: int) -> int:
    """Values per scale for heads of `head_dim`. Raises UserError for unknown bits or heads without one."""
    if bits not in BITS:
        raise UserError(f"keys and values of {bits} bits are not one of {', '.join(map(str, BITS))}")
    size = next((size for size in GROUP_SIZES if head_dim % size == 0), None)
    if size is None:
        raise UserError(
            f"keys and values of {bits} bits: MLX's groups of {GROUP_SIZES[-1]} values do not divide this "
            f"base's head_dim of {head_dim}"
        )
    return size


def empty_rows(kv_heads: int, head_dim: int, dtype: mx.Dtype, bits: int | None) -> tuple[mx.array, ...]:
    """Arrays [1, kv_heads, 0, width] that rows are kept in: the values, or codes, scales and biases."""
    if bits is None:
        return (mx.zeros((1, kv_heads, 0, head_dim), dtype),)
    factors = mx.zeros((1, kv_heads, 0, head_dim // group_size_for(head_dim, bits)), dtype)
    return mx.zeros((1, kv_heads, 0, head_dim * bits // WORD), mx.uint32), factors, factors


@dataclass(frozen=True)
class PackedRows:
    """Quantized rows [1, kv_heads, S, head_dim], read without unpacking them.

    codes: uint32 [1, kv_heads, S, head_dim · bits / 32]; scales, biases: [1, kv_heads, S, groups].
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return *self.codes.shape[:3], self.head_dim

    @property
    def format(self) -> dict[str, int]:
        """MLX's options; they follow from the widths."""
        bits = self.codes.shape[-1] * WORD // self.head_dim
        return {"group_size": self.head_dim // self.scales.shape[-1], "bits": bits}

    def astype(self, dtype: mx.Dtype) -> PackedRows:
        """The same codes, with scales and biases in the type that is to be computed in."""
        scales, biases = self.scales.astype(dtype), self.biases.astype(dtype)
        return PackedRows(self.codes, scales, biases, self.head_dim)

    def pack(self, rows: mx.array) -> tuple[mx.array, ...]:
        """Rows [1, kv_heads, R, head_dim] in this format: codes, scales, biases."""
        return mx.quantize(rows, **self.format)

    def unpack(self) -> mx.array:
        """The values that the codes stand for."""
        return mx.dequantize(self.codes, self.scales, self.biases, **self.format)

    def product(self, x: mx.array, transpose: bool) -> mx.array:
        """x [1, kv_heads, M, head_dim] @ rowsᵀ (transpose), or x [1, kv_heads, M, S] @ rows."""
        return mx.quantized_matmul(
            x, self.codes, self.scales, self.biases, transpose=transpose, **self.format
        )


def reads_packed() -> bool:
    """Whether attention multiplies with the codes. On a GPU, where reading memory is what costs; on a CPU
    MLX's product of many rows with codes takes tens of times as long as unpacking for an ordinary one."""
    return mx.default_device() == mx.gpu
