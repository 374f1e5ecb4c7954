"""Batches of JAX arrays."""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farandole.data.block import RowBlock
from farandole.data.columns import Masked, Ragged, mapped
from farandole.data.loader import BatchLoader
from farandole.errors import ColumnError

for kind in (RowBlock, Masked, Ragged):
    names = [field.name for field in dataclasses.fields(kind)]
    jax.tree_util.register_dataclass(kind, data_fields=names, meta_fields=[])


class JaxLoader(BatchLoader):
    """Gives a `RowBlock` of JAX arrays for each step; see `BatchLoader` for all else.

    Such blocks are pytrees: they may be passed to functions under `jax.jit`, unless there are
    columns that JAX has no type for, which stay as they are, as strings do. Row ids stay numpy
    arrays. Rank and world size are by default those of `jax.process_index` and
    `jax.process_count`.

    Raises
    ------
    ColumnError
        When iterating: an integer needs 64 bits, which JAX has switched off.
    """

    def _convert(self, block: RowBlock) -> RowBlock:
        return block.map(
            lambda column: column if column is block.row_ids else mapped(column, _to_jax)
        )

    def _current_place(self) -> tuple[int, int]:
        return jax.process_index(), jax.process_count()


def _to_jax(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "fiub":
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and dtype != array.dtype and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ColumnError(
                path="JAX batch",
                column="of integers",
                problem=f"holds {array.min()} to {array.max()}, more than {dtype} can; "
                "set jax.config.update('jax_enable_x64', True)",
            )
    return jnp.asarray(array, dtype)
