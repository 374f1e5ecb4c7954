"""What every Arrow type becomes in a batch."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import Masked, ParquetDataset, Ragged

UTC = dt.UTC
DAY = dt.date(1970, 1, 3)
MORNING = dt.datetime(1970, 1, 1, 0, 0, 2)
TENSOR = pa.fixed_shape_tensor(pa.float32(), [2, 3])
TURNED = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0])


def plain(column: Any) -> Any:
    """Return a column as something that can be compared: its form, type and values."""
    if isinstance(column, Masked):
        assert not column.values[~column.valid].any()
        return "masked", str(column.values.dtype), column.values.tolist(), column.valid.tolist()
    if isinstance(column, Ragged):
        assert column.offsets.dtype == np.int64
        return "ragged", plain(column.values), column.offsets.tolist()
    if isinstance(column, pa.Array):
        return "arrow", str(column.type), column.to_pylist()
    return str(column.dtype), list(column.shape[1:]), np.asarray(column).tolist()


def masked(dtype: str, values: list[Any]) -> Any:
    """Return what `plain` gives for integers, None where there is none."""

    def each(value: Any, function: Any) -> Any:
        return [each(v, function) for v in value] if isinstance(value, list) else function(value)

    zero: Any = False if dtype == "bool" else 0
    filled = each(values, lambda value: zero if value is None else value)
    return "masked", dtype, filled, each(values, lambda value: value is not None)


def number(dtype: str, raw: list[Any], shown: list[Any] | None = None) -> Any:
    """Return values of a type whose nulls need a mask, and what they become."""
    shown = raw if shown is None else shown
    return raw, (dtype, [], shown), lambda values: masked(dtype, values)


def floating(dtype: str, raw: list[Any], shown: list[Any] | None = None) -> Any:
    def nan(values: list[Any]) -> Any:
        return dtype, [], [np.nan if value is None else value for value in values]

    return raw, nan(raw if shown is None else shown), nan


def arrow(kind: str, raw: list[Any]) -> Any:
    return raw, ("arrow", kind, raw), lambda values: ("arrow", kind, values)


CASES: dict[str, tuple[pa.DataType, Any]] = {
    "bool": (pa.bool_(), number("bool", [True, False])),
    **{
        str(kind): (kind, number(str(kind), [1, 100]))
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())
    },
    **{
        str(kind): (kind, number(str(kind), [1, 200]))
        for kind in (pa.uint8(), pa.uint16(), pa.uint32())
    },
    "uint64": (pa.uint64(), number("uint64", [1, 2**63])),
    "float16": (pa.float16(), floating("float16", [np.float16(0.5), np.float16(2)], [0.5, 2.0])),
    "float32": (pa.float32(), floating("float32", [0.5, 2.0])),
    "float64": (pa.float64(), floating("float64", [0.1, 0.2])),
    "date32": (pa.date32(), number("int64", [DAY, DAY], [2, 2])),
    "timestamp[ms]": (pa.timestamp("ms"), number("int64", [MORNING, MORNING], [2000, 2000])),
    "timestamp[us]": (pa.timestamp("us"), number("int64", [MORNING, MORNING], [2000000] * 2)),
    "timestamp[ns]": (pa.timestamp("ns"), number("int64", [MORNING, MORNING], [2 * 10**9] * 2)),
    "timestamp with zone": (
        pa.timestamp("ms", "Asia/Kolkata"),
        number("int64", [MORNING.replace(tzinfo=UTC)] * 2, [2000, 2000]),
    ),
    "time32[ms]": (pa.time32("ms"), number("int64", [dt.time(0, 0, 1)] * 2, [1000, 1000])),
    "time64[us]": (pa.time64("us"), number("int64", [dt.time(0, 0, 1)] * 2, [10**6] * 2)),
    "duration[s]": (pa.duration("s"), number("int64", [dt.timedelta(seconds=3)] * 2, [3, 3])),
    **{
        str(kind): (kind, floating("float64", [Decimal("1.25"), Decimal("-3.50")], [1.25, -3.5]))
        for kind in (
            pa.decimal32(5, 2),
            pa.decimal64(9, 2),
            pa.decimal128(20, 2),
            pa.decimal256(50, 2),
        )
    },
    "string": (pa.string(), arrow("string", ["a", "ü"])),
    "large_string": (pa.large_string(), arrow("large_string", ["a", "ü"])),
    "string_view": (pa.string_view(), arrow("string", ["a", "ü"])),
    "binary": (pa.binary(), arrow("binary", [b"a", b""])),
    "large_binary": (pa.large_binary(), arrow("large_binary", [b"a", b""])),
    "binary_view": (pa.binary_view(), arrow("binary", [b"a", b""])),
    "dictionary of strings": (
        pa.dictionary(pa.int16(), pa.string()),
        arrow("string", ["x", "y"]),
    ),
}


def read(folder: Path, array: pa.Array, choice: Any = None, **options: Any) -> Any:
    """Write a column after an empty file, and return it as read, with its block's form."""
    pq.write_table(pa.table({"c": array.slice(0, 0)}), folder / "0.parquet")
    pq.write_table(pa.table({"c": array}), folder / "1.parquet", row_group_size=2)
    dataset = ParquetDataset(folder, columns={"c": choice}, **options)
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    return block.columns["c"]


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("nulls", ["no nulls", "some nulls", "all null", "empty"])
def test_each_type(tmp_path: Path, name: str, nulls: str) -> None:
    kind, (raw, without, with_nulls) = CASES[name]
    shown = without[2] if without[0] != "arrow" else raw
    values = {"some nulls": [raw[0], None, raw[1]], "all null": [None] * 3}.get(nulls, raw)
    column = read(tmp_path, array_of(values, kind))
    if nulls == "empty":
        (block,) = ParquetDataset(tmp_path).read_rows([range(0)])
        assert plain(block.columns["c"]) == (*without[:2], [])
    elif nulls == "no nulls":
        assert plain(column) == without
    else:
        expected = {"some nulls": [shown[0], None, shown[1]], "all null": [None] * 3}[nulls]
        assert repr(plain(column)) == repr(with_nulls(expected))
