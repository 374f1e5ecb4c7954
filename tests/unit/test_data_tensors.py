from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetDataset
from farandole.data.tensors import as_tensor, pack, stored_field, tensor_type, unpack

FLAT = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24, dtype=np.float32)), 3)
TENSORS = {
    "flat": FLAT,
    "sliced": FLAT[2:7],
    "empty": FLAT[:0],
    "nested": pa.FixedSizeListArray.from_arrays(FLAT, 2),
    "bytes": pa.array([[1, 2], [3, 255]], pa.list_(pa.uint8(), 2)),
    "half": pa.array(np.ones((2, 2)).tolist(), pa.list_(pa.float16(), 2)),
    "nulls": pa.array([[1.0, 2], None, [3, 4]], pa.list_(pa.float64(), 2)),
    "nulls sliced": pa.array([None, [1.0, 2], None, [3, 4]], pa.list_(pa.float64(), 2))[1:],
    "arrow": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [1, 3]), FLAT),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_from_bytes(name):
    array = TENSORS[name]
    field = stored_field(pa.field("x", array.type))
    assert field is not None
    assert tensor_type(field) == array.type
    stored = pack(array, field.type)
    stored.validate(full=True)
    again = unpack(stored, array.type)
    again.validate(full=True)
    assert again.equals(array)
    assert unpack(stored[1:], array.type).equals(array[1:])


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.list_(pa.int64()),
        pa.list_(pa.string(), 2),
        pa.list_(pa.bool_(), 2),
        pa.list_(pa.int64(), 0),
        pa.fixed_shape_tensor(pa.int8(), [2, 2], permutation=[1, 0]),
    ],
    ids=str,
)
def test_other_types_are_left_as_they_are(kind):
    assert stored_field(pa.field("x", kind)) is None


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([[[1, 2]], [None, [3, 4]]], 2),
        ([[[1, 2], [3]]], None),
        ([[[1, None]]], None),
        ([[[1, 2, 3]], [[1, 2]]], None),
        ([[[]]], None),
        ([[None], [None]], None),
    ],
)
def test_lists_of_one_length_are_tensors(values, size):
    arrays = [pa.array(part, pa.list_(pa.int64())) for part in values]
    found = as_tensor(pa.field("x", arrays[0].type), arrays)
    assert (found and tensor_type(found)) == (size and pa.list_(pa.int64(), size))


def test_a_null_inside_of_a_tensor_is_no_tensor():
    array = pa.array([[1, None]], pa.list_(pa.int64(), 2))
    assert as_tensor(pa.field("x", array.type), [array]) is None


def test_a_data_set_gives_stored_tensors_as_the_lists_that_they_were(tmp_path):
    field = stored_field(pa.field("x", FLAT.type))
    stored = pa.table([pack(FLAT, field.type)], schema=pa.schema([field]))
    pq.write_table(stored, tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": FLAT}), tmp_path / "b.parquet")
    dataset = ParquetDataset(tmp_path)
    assert dataset.schema.field("x").type == FLAT.type
    found = pa.chunked_array([batch.column(0) for batch in dataset.scan(["x"])])
    assert found.to_pylist() == FLAT.to_pylist() * 2
