"""What every Arrow type becomes in a batch."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole as fa
from farandole.data import Masked, ParquetDataset, Ragged, RowBlock
from farandole.data.forms import make_form
from farandole.data.nested import nodes_of
from farandole.errors import ColumnError, DataError, UsageError
from farandole.plan.slots import slots_of

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


def shaped(dtype: str, shape: list[int], values: list[Any], missing: Any = None) -> Any:
    """Return the like for values that are arrays; `missing` is what stands for a null."""

    def with_nulls(shown: list[Any]) -> Any:
        if missing is not None:
            return dtype, shape, [missing if value is None else value for value in shown]
        nothing = np.full(shape, None).tolist()
        return masked(dtype, [nothing if value is None else value for value in shown])

    return values, (dtype, shape, values), with_nulls


CUBE: list[Any] = np.arange(12.0).reshape(2, 2, 3).tolist()

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
    "list of strings": (pa.list_(pa.string()), arrow("list<element: string>", [["x"], []])),
    "fixed-size list of strings": (
        pa.list_(pa.string(), 2),
        arrow("fixed_size_list<element: string>[2]", [["x", "y"], ["z", None]]),
    ),
    "fixed-size list of floats": (
        pa.list_(pa.float32(), 2),
        shaped("float32", [2], [[0.5, 1.0], [2.0, 3.0]], [np.nan, np.nan]),
    ),
    "fixed-size list of integers": (
        pa.list_(pa.int8(), 2),
        shaped("int8", [2], [[1, 2], [3, 4]]),
    ),
    "fixed-size list of lists": (
        pa.list_(pa.list_(pa.int32(), 1), 2),
        shaped("int32", [2, 1], [[[1], [2]], [[3], [4]]]),
    ),
    "fixed-size binary": (pa.binary(2), shaped("uint8", [2], [[97, 98], [0, 255]])),
    "tensor": (TENSOR, shaped("float32", [2, 3], CUBE, [[np.nan] * 3] * 2)),
    "tensor with a permutation": (
        TURNED,
        shaped("int16", [3, 2], np.swapaxes(CUBE, 1, 2).astype(int).tolist()),
    ),
    "uuid": (pa.uuid(), shaped("uint8", [16], [[97] * 16, [98] * 16])),
    "json": (pa.json_(), arrow("string", ["{}", "[1]"])),
    "bool8": (pa.bool8(), number("bool", [True, False])),
}


def read(folder: Path, array: pa.Array, choice: Any = None, **options: Any) -> Any:
    """Write a column after an empty file, and return it as read, with its block's form."""
    pq.write_table(pa.table({"c": array.slice(0, 0)}), folder / "0.parquet")
    pq.write_table(pa.table({"c": array}), folder / "1.parquet", row_group_size=2)
    dataset = ParquetDataset(folder, columns={"c": choice}, **options)
    fixed = isinstance(array.type, pa.FixedSizeListType | pa.FixedShapeTensorType)
    if fixed and array.null_count and int(pa.__version__.partition(".")[0]) < 26:
        with pytest.raises(DataError, match="install pyarrow 26 or later"):
            list(dataset.read_rows([range(dataset.num_rows)]))
        pytest.skip(f"pyarrow {pa.__version__} cannot read nulls in lists of one size")
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    return block.columns["c"]


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        axes = [1, 0] if kind.permutation == [1, 0] else [0, 1]  # in memory as stored
        flat = [None if v is None else np.transpose(v, axes).ravel().tolist() for v in values]
        return pa.ExtensionArray.from_storage(kind, pa.array(flat, kind.storage_type))
    if kind in (pa.uuid(), pa.bool8()):
        make: Any = bytes if kind == pa.uuid() else int
        stored = [None if v is None else make(v) for v in values]
        return pa.ExtensionArray.from_storage(kind, pa.array(stored, kind.storage_type))
    if pa.types.is_fixed_size_binary(kind):
        values = [None if v is None else bytes(v) for v in values]
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


def test_a_column_without_a_type(tmp_path: Path) -> None:
    assert repr(plain(read(tmp_path, pa.nulls(2)))) == repr(("float32", [], [np.nan, np.nan]))


def test_strings_and_binaries_are_dictionary_coded_by_integers_too(tmp_path: Path) -> None:
    column = read(tmp_path, pa.array([5, None, 5], pa.int64()).dictionary_encode())
    assert plain(column) == masked("int64", [5, None, 5])


# --- lists ------------------------------------------------------------------------------------

LISTS: list[tuple[str, pa.Array, Any]] = [
    (
        "integers",
        pa.array([[1, 2], [3]], pa.list_(pa.int16())),
        ("ragged", ("int16", [], [1, 2, 3]), [0, 2, 3]),
    ),
    (
        "with nulls",
        pa.array([[1, None], None, []], pa.list_(pa.int16())),
        ("ragged", masked("int16", [1, None]), [0, 2, 2, 2]),
    ),
    (
        "all null",
        pa.array([None, None], pa.list_(pa.int16())),
        ("ragged", masked("int16", []), [0, 0, 0]),
    ),
    (
        "never null",
        pa.array([[1], []], pa.list_(pa.field("element", pa.int16(), False))).cast(
            pa.list_(pa.field("element", pa.int16(), False))
        ),
        ("ragged", masked("int16", [1]), [0, 1, 1]),
    ),
    (
        "floats",
        pa.array([[0.5], [], [1.5, 2.5]], pa.large_list(pa.float32())),
        ("ragged", ("float32", [], [0.5, 1.5, 2.5]), [0, 1, 1, 3]),
    ),
    (
        "views",
        pa.array([[1], [2, 3]], pa.list_view(pa.int64())),
        ("ragged", ("int64", [], [1, 2, 3]), [0, 1, 3]),
    ),
    (
        "times",
        pa.array([[dt.timedelta(seconds=1)]], pa.list_(pa.duration("ms"))),
        ("ragged", ("int64", [], [1000]), [0, 1]),
    ),
    (
        "lists",
        pa.array([[[1, 2], [3]], [[4]]], pa.list_(pa.list_(pa.int32()))),
        ("ragged", ("ragged", ("int32", [], [1, 2, 3, 4]), [0, 2, 3, 4]), [0, 2, 3]),
    ),
    (
        "fixed-size lists",
        pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int32(), 2))),
        ("ragged", ("int32", [2], [[1, 2], [3, 4], [5, 6]]), [0, 1, 3]),
    ),
    (
        "dictionaries",
        pa.array([["x"], ["y", "x"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        ("arrow", "list<element: string>", [["x"], ["y", "x"]]),
    ),
]


@pytest.mark.parametrize(("array", "expected"), [c[1:] for c in LISTS], ids=[c[0] for c in LISTS])
def test_lists(tmp_path: Path, array: pa.Array, expected: Any) -> None:
    column = read(tmp_path, array)
    assert plain(column) == expected
    (block,) = ParquetDataset(tmp_path).read_rows([range(0)])
    assert len(block.columns["c"]) == 0


def test_rows_of_a_ragged_column() -> None:
    column = Ragged(Ragged(np.arange(5), np.array([0, 2, 3, 5])), np.array([0, 1, 3]))
    assert [list(row.values) for row in column] == [[0, 1], [2, 3, 4]]
    assert column[-1][1].tolist() == [3, 4]
    assert plain(column[1:]) == ("ragged", ("ragged", ("int64", [], [2, 3, 4]), [0, 1, 3]), [0, 2])
    assert len(column[5:]) == 0
    with pytest.raises(IndexError):
        column[2]


# --- structs ----------------------------------------------------------------------------------


def nested() -> pa.Table:
    point = pa.struct([("x", pa.int32()), ("deep", pa.struct([("y", pa.float32())]))])
    points = [{"x": 1, "deep": {"y": 0.5}}, None, {"x": None, "deep": {"y": 2.0}}]
    return pa.table(
        {
            "p": pa.array(points, point),
            "l": pa.array([[points[0]], [], [points[2], points[0]]], pa.list_(point)),
            "m": pa.array(
                [[("a", 1)], None, [("b", 2), ("c", None)]], pa.map_(pa.string(), pa.int8())
            ),
            "id": pa.array([7, 8, 9], pa.int16()),
        }
    )


def test_fields_have_dotted_names(tmp_path: Path) -> None:
    pq.write_table(nested(), tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path)
    (block,) = dataset.read_rows([range(3)])
    columns = {name: plain(column) for name, column in block.columns.items()}
    assert list(columns) == ["p.x", "p.deep.y", "l.x", "l.deep.y", "m.key", "m.value", "id"]
    assert dataset.schema.names == list(columns)
    assert columns["p.x"] == masked("int32", [1, None, None])
    assert repr(columns["p.deep.y"]) == repr(("float32", [], [0.5, np.nan, 2.0]))
    offsets = [0, 1, 1, 3]
    assert columns["l.x"] == ("ragged", masked("int32", [1, None, 1]), offsets)
    assert columns["l.deep.y"] == ("ragged", ("float32", [], [0.5, 2.0, 0.5]), offsets)
    assert columns["m.key"][0] == "arrow"
    assert columns["m.key"][2] == [["a"], None, ["b", "c"]]
    assert columns["m.value"] == ("ragged", masked("int8", [1, 2, None]), offsets)


def test_a_struct_stands_for_its_fields_or_is_kept(tmp_path: Path) -> None:
    pq.write_table(nested(), tmp_path / "x.parquet")
    (block,) = ParquetDataset(tmp_path, columns=["p.deep", "id"]).read_rows([range(3)])
    assert list(block.columns) == ["p.deep.y", "id"]
    keep = {"p": fa.arrow(), "m": fa.arrow(), "p.x": fa.filled(-1)}
    (block,) = ParquetDataset(tmp_path, columns=keep).read_rows([range(1, 3)])
    assert block.columns["p"].to_pylist() == nested()["p"].to_pylist()[1:]
    assert block.columns["m"].to_pylist() == nested()["m"].to_pylist()[1:]
    assert block.columns["p.x"].tolist() == [-1, -1]
    with pytest.raises(
        ColumnError, match=r"'p' has fields; declare what becomes of each: p\.x, p\.d"
    ):
        ParquetDataset(tmp_path, columns={"p": fa.masked()}).validate()
    with pytest.raises(ColumnError, match=r"'p\.z' does not exist; did you mean 'p\.x'"):
        ParquetDataset(tmp_path, columns=["p.z"]).validate()


def test_fields_serve_as_features_labels_and_filters(tmp_path: Path) -> None:
    pq.write_table(nested(), tmp_path / "x.parquet")
    dataset = ParquetDataset(
        tmp_path, features=["p.deep.y", "id"], label="p.x", filters=[("p.x", "=", 1)]
    )
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    assert block.features is not None
    assert block.label is not None
    assert block.features.tolist() == [[0.5, 7.0]]
    assert block.label.tolist() == [1]


def test_a_column_comes_before_a_field_of_its_name(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1, "c": 2}], "a.b": [3], "ä ö": [4], "a.": [5], ".": [6]})
    pq.write_table(table, tmp_path / "x.parquet")
    names = ["a.b", "a.c", "ä ö", "a.", "."]
    (block,) = ParquetDataset(tmp_path, columns=names).read_rows([range(1)])
    assert [block.columns[name].tolist() for name in names] == [[3], [2], [4], [5], [6]]
    for columns in (None, ["a"]):
        with pytest.raises(ColumnError, match=r"'a.b' hides a field of 'a': name the columns"):
            ParquetDataset(tmp_path, columns=columns).validate()
    both = ParquetDataset(tmp_path, columns={"a": fa.arrow(), "a.b": None})
    (block,) = both.read_rows([range(1)])
    assert block.columns["a"].to_pylist() == [{"b": 1, "c": 2}]
    assert block.columns["a.b"].tolist() == [3]


# --- files that differ ------------------------------------------------------------------------


def two(folder: Path, one: pa.Array, other: pa.Array, **options: Any) -> tuple[ParquetDataset, Any]:
    """Return what is read of two files with a column each."""
    pq.write_table(pa.table({"c": one}), folder / "0.parquet")
    pq.write_table(pa.table({"c": other}), folder / "1.parquet")
    dataset = ParquetDataset(folder, **options)
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    return dataset, block.columns


def test_integers_beside_floats(tmp_path: Path) -> None:
    _, columns = two(tmp_path, pa.array([1, None], pa.int32()), pa.array([0.5]))
    assert repr(plain(columns["c"])) == repr(("float64", [], [1.0, np.nan, 0.5]))


def test_null_before_a_type(tmp_path: Path) -> None:
    _, columns = two(tmp_path, pa.nulls(1), pa.array([[1, 2]], pa.list_(pa.int8())))
    assert plain(columns["c"]) == ("ragged", masked("int8", [1, 2]), [0, 0, 2])


def test_a_group_of_nulls_before_typed_ones(tmp_path: Path) -> None:
    column = read(tmp_path, pa.array([None, None, 1, 2], pa.int8()))
    assert plain(column) == masked("int8", [None, None, 1, 2])


def test_decimals_of_two_precisions(tmp_path: Path) -> None:
    narrow = pa.array([Decimal("1.12345")], pa.decimal128(7, 5))
    wide = pa.array([Decimal("123.12345")], pa.decimal128(8, 5))
    _, columns = two(tmp_path, narrow, wide)
    assert plain(columns["c"]) == ("float64", [], [1.12345, 123.12345])
    dataset = ParquetDataset(tmp_path, columns={"c": fa.scaled_int()})
    (block,) = dataset.read_rows([range(2)])
    assert plain(block.columns["c"]) == ("int64", [], [112345, 12312345])
    assert dataset.forms == {"c": "int64 (n): times 10**5"}


def test_times_of_two_units_and_zones(tmp_path: Path) -> None:
    paris = pa.array([1], pa.timestamp("ms", "Europe/Paris"))
    tokyo = pa.array([1], pa.timestamp("us", "Asia/Tokyo"))
    dataset, columns = two(tmp_path, paris, tokyo)
    assert plain(columns["c"]) == ("int64", [], [1000, 1])
    assert dataset.forms == {"c": "int64 (n): us since 1970-01-01 UTC"}
    pq.write_table(pa.table({"c": pa.array([1], pa.timestamp("us"))}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"'c' is timestamp.us., but timestamp.ms, tz=UTC. in"):
        ParquetDataset(tmp_path).validate()


def test_fields_that_only_some_files_have(tmp_path: Path) -> None:
    one = pa.array([{"x": 1}], pa.struct([("x", pa.int8())]))
    other = pa.array([{"y": "s", "x": 0.5}], pa.struct([("y", pa.string()), ("x", pa.float64())]))
    _, columns = two(tmp_path, one, other)
    assert plain(columns["c.x"]) == ("float64", [], [1.0, 0.5])
    assert plain(columns["c.y"]) == ("arrow", "string", [None, "s"])


def test_a_struct_beside_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'c' is int64, but struct"):
        two(tmp_path, pa.array([{"x": 1}]), pa.array([1]))


def test_dictionaries_that_differ_between_groups(tmp_path: Path) -> None:
    one = pa.chunked_array(
        [pa.array(["x", "y"]).dictionary_encode(), pa.array(["z", "x"]).dictionary_encode()]
    )
    pq.write_table(pa.table({"c": one}), tmp_path / "0.parquet", row_group_size=2)
    pq.write_table(pa.table({"c": pa.array(["w"])}), tmp_path / "1.parquet")
    dataset = ParquetDataset(tmp_path, columns={"c": fa.coded(["w", "x", "y"])})
    (block,) = dataset.read_rows([range(5)])
    assert block.columns["c"].tolist() == [2, 3, 0, 2, 1]
    (block,) = ParquetDataset(tmp_path).read_rows([range(5)])
    assert block.columns["c"].to_pylist() == ["x", "y", "z", "x", "w"]


def test_many_columns(tmp_path: Path) -> None:
    table = pa.table({f"c{i}": pa.array([i, None], pa.int32()) for i in range(5000)})
    pq.write_table(table, tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path)
    (block,) = dataset.read_rows([range(2)])
    assert len(block.columns) == 5000
    assert plain(block.columns["c4999"]) == masked("int32", [4999, None])


# --- choices ----------------------------------------------------------------------------------

WORDS = pa.array(["a", None, "b", "a"])
TAGS = pa.array([["a", "b", "c"], None, [], ["b", None]])
CHOICES: list[tuple[str, pa.Array, Any, Any]] = [
    ("masked", pa.array([1, 2], pa.int8()), fa.masked(), masked("int8", [1, 2])),
    (
        "masked floats",
        pa.array([0.5, None, np.nan]),
        fa.masked(),
        ("masked", "float64", [0.5, 0.0, np.nan], [True, False, True]),
    ),
    ("filled", pa.array([1, None], pa.int8()), fa.filled(-1), ("int8", [], [1, -1])),
    ("filled floats", pa.array([0.5, None]), fa.filled(2), ("float64", [], [0.5, 2.0])),
    ("filled bools", pa.array([True, None]), fa.filled(False), ("bool", [], [True, False])),
    ("filled strings", WORDS, fa.filled("?"), ("arrow", "string", ["a", "?", "b", "a"])),
    (
        "filled times",
        pa.array([DAY, None], pa.date32()),
        fa.filled(dt.date(1970, 1, 1)),
        ("int64", [], [2, 0]),
    ),
    (
        "filled lists",
        pa.array([[1, None], None], pa.list_(pa.int8())),
        fa.filled(0),
        ("ragged", ("int8", [], [1, 0]), [0, 2, 2]),
    ),
    (
        "filled fixed-size lists",
        pa.array([[1, None], None], pa.list_(pa.int8(), 2)),
        fa.filled(9),
        ("int8", [2], [[1, 9], [9, 9]]),
    ),
    (
        "filled tensors",
        pa.ExtensionArray.from_storage(TURNED, pa.array([range(6), None], pa.list_(pa.int16(), 6))),
        fa.filled(9),
        ("int16", [3, 2], [[[0, 3], [1, 4], [2, 5]], [[9, 9]] * 3]),
    ),
    (
        "scaled",
        pa.array([Decimal("1.25"), None, Decimal("-0.01")], pa.decimal128(38, 2)),
        fa.scaled_int(),
        masked("int64", [125, None, -1]),
    ),
    (
        "scaled 256",
        pa.array([Decimal("1.5")], pa.decimal256(50, 1)),
        fa.scaled_int(),
        ("int64", [], [15]),
    ),
    (
        "scaled 32",
        pa.array([Decimal("1.5")], pa.decimal32(5, 1)),
        fa.scaled_int(),
        ("int64", [], [15]),
    ),
    ("coded", WORDS, fa.coded(["b", "a"]), ("int64", [], [2, 0, 1, 2])),
    (
        "coded integers",
        pa.array([5, 300, None], pa.int16()),
        fa.coded([300, 70000]),
        ("int64", [], [0, 1, 0]),
    ),
    (
        "coded lists",
        TAGS,
        fa.coded(["a", "c"]),
        ("ragged", ("int64", [], [1, 0, 2, 0, 0]), [0, 3, 3, 3, 5]),
    ),
    (
        "padded",
        pa.array([[1, 2, 3], None, [], [4, None]], pa.list_(pa.int16())),
        fa.padded(2),
        masked("int16", [[1, 2], [None, None], [None, None], [4, None]]),
    ),
    (
        "padded with a value",
        pa.array([[0.5], []]),
        fa.padded(2, fill=-1),
        ("masked", "float64", [[0.5, -1.0], [-1.0, -1.0]], [[True, False], [False, False]]),
    ),
    (
        "padded lists of lists",
        pa.array([[[1, 2, 3]], [[4], [], [5]]], pa.list_(pa.list_(pa.int8()))),
        fa.padded(2, 2),
        masked("int8", [[[1, 2], [None, None]], [[4, None], [None, None]]]),
    ),
    (
        "padded fixed-size lists",
        pa.array([[[1, 2]], []], pa.list_(pa.list_(pa.int8(), 2))),
        fa.padded(2),
        masked("int8", [[[1, 2], [None, None]], [[None, None], [None, None]]]),
    ),
    (
        "padded codes",
        TAGS,
        fa.padded(2, of=fa.coded(["a", "b"])),
        masked("int64", [[1, 2], [None, None], [None, None], [2, None]]),
    ),
    ("arrow", pa.array([1, None], pa.int8()), fa.arrow(), ("arrow", "int8", [1, None])),
    (
        "decoded",
        pa.array([b"ab", b"cd"]),
        fa.decode(lambda b: list(b)),
        ("int64", [2], [[97, 98], [99, 100]]),
    ),
    ("decoded text", pa.array(["1", "2"]), fa.decode(float), ("float64", [], [1.0, 2.0])),
]


@pytest.mark.parametrize(
    ("array", "choice", "expected"), [c[1:] for c in CHOICES], ids=[c[0] for c in CHOICES]
)
def test_choices(tmp_path: Path, array: pa.Array, choice: Any, expected: Any) -> None:
    if isinstance(choice, type(fa.padded(1))) and choice.fill:
        column = read(tmp_path, array, choice)
        assert (
            "masked",
            str(column.values.dtype),
            column.values.tolist(),
            column.valid.tolist(),
        ) == expected
    else:
        assert repr(plain(read(tmp_path, array, choice))) == repr(expected)


def test_hashes_are_the_same_everywhere(tmp_path: Path) -> None:
    hashes = read(tmp_path, WORDS, fa.hashed())
    digest = hashlib.blake2b(b"a", digest_size=8).digest()
    a = int.from_bytes(digest, "little", signed=True)
    assert hashes.tolist()[:2] == [a, 0]
    assert hashes.tolist()[3] == a != hashes.tolist()[2]
    buckets = read(tmp_path, WORDS, fa.hashed(10)).tolist()
    assert buckets[0] == 1 + int.from_bytes(digest, "little") % 9
    assert buckets[1] == 0
    assert plain(read(tmp_path, pa.array([b"a"]), fa.hashed()))[2] == [a]
    assert read(tmp_path, TAGS, fa.hashed())[0].tolist()[0] == a
    numbers = read(tmp_path, pa.array([12], pa.int8()), fa.hashed())
    assert numbers.tolist() == read(tmp_path, pa.array(["12"]), fa.hashed()).tolist()


def test_npy(tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32, order="F")]

    def saved(array: np.ndarray) -> bytes:
        stream = io.BytesIO()
        np.save(stream, array)
        return stream.getvalue()

    column = read(tmp_path, pa.array(map(saved, arrays)), fa.npy())
    assert column.dtype == np.float32
    assert np.array_equal(column, arrays)
    for bad, message in [
        (b"", "no npy file"),
        (None, "a null"),
        (b"\x93NUMPY\x01\x00rubbish", "no npy file"),
        (saved(np.ones(3)), r"several forms: float32\[2, 3\], float64\[3\]"),
        (saved(np.array([None])), "Python objects"),
    ]:
        with pytest.raises(ColumnError, match=f"'c' holds .*{message}"):
            read(tmp_path, pa.array([saved(arrays[0]), bad]), fa.npy())


def test_decoding_tells_its_column(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        read(tmp_path, pa.array([b"a"]), fa.decode(lambda data: 1 // 0))
    assert caught.value.__notes__ == ["raised by the decode() function of column 'c'"]
    with pytest.raises(ColumnError, match="stack=False"):
        read(tmp_path, pa.array([b"a", b"bc"]), fa.decode(list))
    assert read(tmp_path, pa.array([b"a", None]), fa.decode(repr, stack=False)) == ["b'a'", "None"]


REFUSED: list[tuple[pa.Array, Any, str]] = [
    (WORDS, fa.masked(), ".* masked.. is for numbers"),
    (TAGS, fa.filled("x"), ".* filled.. is for numbers"),
    (WORDS, fa.scaled_int(), "is string, and only decimals"),
    (pa.array([0.5]), fa.hashed(), "is double, and only strings"),
    (pa.array([0.5]), fa.coded(["a"]), "is double, and only strings"),
    (WORDS, fa.coded([1, 2]), "is string, and the vocabulary is not"),
    (WORDS, fa.padded(2), "is string, and padded"),
    (TAGS, fa.padded(2), ".*cannot be padded: say what elements become"),
    (TAGS, fa.padded(2, 2), ".* has 2 length"),
    (pa.array([[1]]), fa.padded(2, fill=0.5), ".*cannot hold fill=0.5"),
    (pa.array([[1]]), fa.padded(2, fill=np.nan), ".*cannot hold fill=nan"),
    (pa.array([[1]], pa.list_(pa.uint8())), fa.padded(2, fill=-1), ".*cannot hold fill=-1"),
    (pa.array([1]), fa.filled("x"), "is int64, and filled"),
    (pa.array([1], pa.int8()), fa.filled(300), "is int8, and filled"),
    (pa.array([1]), fa.decode(len), "is int64, and only binaries"),
    (WORDS, fa.npy(), "is string, and only binaries"),
]


@pytest.mark.parametrize(("array", "choice", "message"), REFUSED)
def test_a_choice_that_does_not_suit_is_refused_before_training(
    tmp_path: Path, array: pa.Array, choice: Any, message: str
) -> None:
    pq.write_table(pa.table({"c": array}), tmp_path / "x.parquet")
    with pytest.raises(ColumnError, match=f"column 'c' {message}"):
        ParquetDataset(tmp_path, columns={"c": choice}).validate()


@pytest.mark.parametrize(
    "make",
    [
        lambda: fa.padded(),
        lambda: fa.padded(0),
        lambda: fa.hashed(1),
        lambda: fa.coded(["a", "a"]),
        lambda: fa.coded(["a", None]),
    ],
)
def test_choices_are_checked_when_made(make: Any) -> None:
    with pytest.raises(UsageError, match="give"):
        make()


def test_a_scaled_integer_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    huge = pa.array([Decimal(10) ** 20], pa.decimal128(30, 0))
    for array in (huge, pa.array([huge.to_pylist()], pa.list_(huge.type))):
        with pytest.raises(ColumnError, match="'c' holds a decimal of more than 18 digits"):
            read(tmp_path, array, fa.scaled_int())


# --- order ------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    num_slots=st.integers(1, 6),
    world_size=st.integers(1, 4),
    window_rows=st.integers(2, 30),
    cached=st.booleans(),
    batch_size=st.integers(6, 50),
)
def test_each_worker_reads_the_same_of_every_form(
    tmp_path_factory: pytest.TempPathFactory,
    num_slots: int,
    world_size: int,
    window_rows: int,
    cached: bool,
    batch_size: int,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    ids = list(range(150))
    lists = [list(range(i % 4)) for i in ids]
    table = pa.table(
        {
            "id": ids,
            "masked": pa.array([None if i % 3 == 0 else i for i in ids], pa.int16()),
            "ragged": lists,
            "words": [str(i) for i in ids],
            "tensor": pa.array([[i, i + 1] for i in ids], pa.list_(pa.int32(), 2)),
            "images": [bytes([i]) * 3 for i in ids],
        }
    )
    pq.write_table(table.slice(0, 70), folder / "0.parquet", row_group_size=20)
    pq.write_table(table.slice(70), folder / "1.parquet", row_group_size=33)
    choices = dict.fromkeys(table.column_names) | {"images": fa.decode(list)}
    dataset = ParquetDataset(folder, columns=choices, buffer_bytes=1 << 20 if cached else 1)
    plan = dataset.epoch_plan(
        seed=3, epoch=1, batch_size=batch_size, num_slots=num_slots, window_rows=window_rows
    )
    for rank in range(min(world_size, num_slots)):
        slots = slots_of(rank, min(world_size, num_slots), num_slots)
        blocks = iter(dataset.read(plan, slots))
        for step in range(plan.num_steps):
            for slot in slots:
                block = next(blocks)
                rows = block.row_ids
                assert np.array_equal(rows, plan.slot_row_ids(step, slot))
                assert np.array_equal(block.columns["id"], rows)
                assert plain(block.columns["masked"]) == masked(
                    "int16", table["masked"].take(rows).to_pylist()
                )
                assert [list(row.values) for row in block.columns["ragged"]] == [
                    lists[row] for row in rows
                ]
                assert block.columns["words"].to_pylist() == [str(row) for row in rows]
                assert block.columns["tensor"].tolist() == [[row, row + 1] for row in rows]
                assert block.columns["images"].tolist() == [[row] * 3 for row in rows]
        assert next(blocks, None) is None


# --- randomness of transforms -----------------------------------------------------------------


def test_random_numbers_of_a_transform_hang_on_epoch_and_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": np.arange(120)}), tmp_path / "x.parquet", row_group_size=25)

    def augment(block: RowBlock) -> RowBlock:
        noise = block.rng().normal(size=block.num_rows)
        return replace(block, columns={"noise": noise, "own": block.uniform(2)})

    def numbers(
        epoch: int, slots: list[range], **plan: Any
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        dataset = ParquetDataset(tmp_path, columns=["id"], transform=augment)
        made = dataset.epoch_plan(
            **{"seed": 1, "batch_size": 40, "num_slots": 4, **plan}, epoch=epoch
        )
        noise, own = {}, {}
        for some in slots:
            for block in dataset.read(made, some):
                noise |= dict(
                    zip(block.row_ids.tolist(), block.columns["noise"].tolist(), strict=True)
                )
                own |= dict(zip(block.row_ids.tolist(), block.columns["own"].tolist(), strict=True))
        return noise, own

    alone = numbers(0, [range(4)])
    assert numbers(0, [range(3), range(3, 4)]) == alone
    assert len(set(alone[0].values())) == 120
    assert numbers(1, [range(4)])[0] != alone[0]
    assert numbers(1, [range(4)])[1] != alone[1]
    assert numbers(0, [range(4)], seed=2)[1] != alone[1]
    other_cuts = numbers(0, [range(2)], num_slots=2, batch_size=24)
    assert other_cuts[1] == alone[1]
    assert other_cuts[0] != alone[0]
    flat = np.array(list(alone[1].values())).ravel()
    assert len(set(flat.tolist())) == 240
    assert 0 <= flat.min() < 0.1 < 0.9 < flat.max() < 1
    assert abs(flat.mean() - 0.5) < 0.1


# --- the page about types ---------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/guide/types.md"
ROWS: list[tuple[str, pa.DataType]] = [
    ("bool", pa.bool_()),
    ("int32, and integers of each other width", pa.int32()),
    ("float32, and floats of each other width", pa.float32()),
    ("decimal32 to decimal256", pa.decimal128(9, 2)),
    ("date32", pa.date32()),
    ("timestamp, of each unit", pa.timestamp("us")),
    ("timestamp with a zone", pa.timestamp("us", "Europe/Paris")),
    ("time32, time64", pa.time64("us")),
    ("duration", pa.duration("ms")),
    ("null", pa.null()),
    ("string, string_view", pa.string()),
    ("large_string", pa.large_string()),
    ("binary, binary_view", pa.binary()),
    ("large_binary", pa.large_binary()),
    ("fixed_size_binary", pa.binary(4)),
    ("dictionary", pa.dictionary(pa.int32(), pa.string())),
    ("list, large_list, list_view", pa.list_(pa.int16())),
    ("list of floats", pa.list_(pa.float32())),
    ("list of lists", pa.list_(pa.list_(pa.int16()))),
    ("list of strings", pa.list_(pa.string())),
    ("fixed_size_list", pa.list_(pa.float32(), 8)),
    ("fixed_size_list of integers", pa.list_(pa.uint8(), 8)),
    ("fixed_size_list of strings", pa.list_(pa.string(), 2)),
    ("extension arrow.fixed_shape_tensor", pa.fixed_shape_tensor(pa.float32(), [3, 32, 32])),
    ("extension arrow.bool8", pa.bool8()),
    ("extension arrow.uuid", pa.uuid()),
    ("extension arrow.json, and others: as what they are stored as", pa.json_()),
    ("struct", pa.struct([("x", pa.int32()), ("y", pa.string())])),
    ("list of structs", pa.list_(pa.struct([("x", pa.int32())]))),
    ("map", pa.map_(pa.string(), pa.float32())),
]


def test_the_page_tells_what_becomes_of_each_type() -> None:
    lines = ["| Arrow type | without nulls | with nulls |", "|---|---|---|"]
    for label, kind in ROWS:
        nodes = [node for node in nodes_of(pa.schema([("c", kind)])) if not node.is_divided]
        cells = []
        for has_nulls in (False, True):
            says = [
                (node, make_form("c", node.kind, None, has_nulls=lambda has=has_nulls: has).says)
                for node in nodes
            ]
            cells.append("; ".join(f"`{n.name}`: {s}" if len(n.path) > 1 else s for n, s in says))
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    assert "\n".join(lines) + "\n\n" in PAGE.read_text()
