"""Damaged files: named by default, left out on request, alike on every rank."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole import cli
from farandole.data import ParquetDataset
from farandole.errors import DamagedFileError, DataError


def write(folder: Path, num_files: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for place in range(num_files):
        ids = np.arange(1000) + 1000 * place
        table = pa.table({"id": ids, "x": rng.random(1000), "y": rng.random(1000)})
        pq.write_table(
            table,
            folder / f"{place}.parquet",
            row_group_size=250,
            use_dictionary=False,
            write_page_checksum=True,
        )


def damage(path: Path, group: int, column: int) -> None:
    """Flip a byte in the middle of a column; the time of change stays."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    with path.open("r+b") as stream:
        stream.seek(chunk.data_page_offset + chunk.total_compressed_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 0xFF]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def ids(dataset: ParquetDataset, ranks: int = 2) -> list[int]:
    """Return all ids of an epoch, as that many ranks read them; ranks must be in step."""
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=64, num_slots=4)
    found: list[int] = []
    for rank in range(ranks):
        blocks = list(dataset.read(plan, range(4 * rank // ranks, 4 * (rank + 1) // ranks)))
        assert len(blocks) == plan.num_steps * 4 // ranks
        found += np.concatenate([block.columns["id"] for block in blocks]).tolist()
    return sorted(found)


BAD_FILES: list[tuple[Any, str]] = [
    (cut, "has no usable footer, as if cut short"),
    (lambda path: path.write_bytes(b""), "is empty, not a Parquet file"),
    (lambda path: path.write_text("these are notes, not rows"), "is not a Parquet file"),
    (lambda path: path.write_bytes(b"PAR1" + b"\0" * 5), "has no usable footer"),
    (lambda path: path.write_bytes(path.read_bytes()[:-4] + b"PARE"), "is encrypted"),
    (lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\xff\xff\xff\x7fPAR1"), "no usable"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_FILES, ids=[case[1] for case in BAD_FILES])
def test_a_file_that_is_no_parquet(
    tmp_path: Path, spoil: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    write(data)
    spoil(data / "1.parquet")
    for _ in range(2):  # from the file, then from the cache
        with pytest.raises(DamagedFileError, match=rf"1\.parquet: .*{message}.*on_bad='skip'"):
            ParquetDataset(data, index_cache=cache).validate()
        dataset = ParquetDataset(data, columns=["id"], on_bad="skip", index_cache=cache)
        with caplog.at_level(logging.WARNING):
            assert ids(dataset) == [*range(1000), *range(2000, 3000)]
        assert message in caplog.text
        (skipped,) = dataset.skipped
        assert skipped.path.endswith("1.parquet")
        assert skipped.row_group is None
        assert message in dataset.warnings()[0]
    (data / "1.parquet").unlink()
    assert ParquetDataset(data, columns=["id"]).fingerprint == dataset.fingerprint


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1)
    cut(tmp_path / "0.parquet")
    with pytest.raises(DamagedFileError, match="no usable footer"):
        ParquetDataset(tmp_path, on_bad="skip").validate()


def test_a_file_that_may_not_be_read_is_never_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 2)

    def refuse(*args: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("farandole.data.footers.read_tail", refuse)
    with pytest.raises(DataError, match=r"0\.parquet: cannot be read: .*Input/output error"):
        ParquetDataset(tmp_path, on_bad="skip", index_cache=None).validate()


@pytest.mark.parametrize("cached", [True, False])
def test_verify_finds_damage_so_that_plans_leave_it_out(tmp_path: Path, cached: bool) -> None:
    data = tmp_path / "data"
    cache = tmp_path / "cache" if cached else None
    write(data)
    damage(data / "1.parquet", 2, column=1)

    def open_it(**options: Any) -> ParquetDataset:
        return ParquetDataset(data, **{"columns": ["id", "x"], "index_cache": cache, **options})

    unaware = open_it(on_bad="skip")
    with pytest.raises(DamagedFileError, match=r"row group 2, column 'x' .* run verify\(\) once"):
        ids(unaware)
    report = unaware.verify()
    assert (report.num_files, report.num_groups) == (3, 12)
    assert "1 damaged" in str(report)
    (found,) = report.damaged
    assert (found.row_group, found.column) == (2, "x")
    expected = [i for i in range(3000) if not 1500 <= i < 1750]
    assert ids(unaware) == ids(unaware, ranks=4) == expected
    assert [error.row_group for error in unaware.skipped] == [2]
    if not cached:
        return
    assert ids(open_it(on_bad="skip")) == expected
    assert open_it(on_bad="skip").fingerprint == unaware.fingerprint
    with pytest.raises(DamagedFileError, match=r"row group 2, column 'x' .* on_bad='skip'"):
        open_it().validate()
    assert ids(open_it(columns=["id", "y"])) == list(range(3000))  # x is not read
    filters = [("id", ">=", 1400)]
    filtered = open_it(on_bad="skip", filters=filters)
    assert ids(filtered) == [i for i in expected if i >= 1400]
    assert ids(open_it(columns=["id"], filters=filters)) == list(range(1400, 3000))
    write(data)  # written anew
    assert ids(open_it()) == list(range(3000))


def test_verify_tells_of_whole_files_too(tmp_path: Path) -> None:
    write(tmp_path)
    cut(tmp_path / "0.parquet")
    damage(tmp_path / "2.parquet", 0, column=0)
    damage(tmp_path / "2.parquet", 0, column=2)
    report = ParquetDataset(tmp_path, index_cache=None).verify()
    found = [(Path(error.path).stem, error.row_group, error.column) for error in report.damaged]
    assert found == [("0", None, None), ("2", 0, "id"), ("2", 0, "y")]


def test_verify_of_what_is_whole(tmp_path: Path) -> None:
    write(tmp_path)
    report = ParquetDataset(tmp_path, index_cache=None).verify()
    assert report.damaged == ()
    assert str(report) == "3 files, 12 row groups: all can be decoded"


def test_a_store_that_fails_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farandole.data.groups import GroupReader

    write(tmp_path)
    damage(tmp_path / "1.parquet", 2, column=1)
    dataset = ParquetDataset(tmp_path, index_cache=None)
    dataset.validate()

    def broken(self: GroupReader, file: int, group: int) -> None:
        raise DataError(path="x", problem="cannot be read", remedy="look")

    monkeypatch.setattr(GroupReader, "_check_bytes", broken)
    with pytest.raises(DataError, match="x: cannot be read"):
        dataset.verify()
    assert dataset._damage == []


def test_a_torn_page(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "0.parquet"
    chunk = pq.read_metadata(path).row_group(1).column(0)
    with path.open("r+b") as stream:
        stream.seek(chunk.data_page_offset)
        stream.write(b"\0" * chunk.total_compressed_size)
    dataset = ParquetDataset(path, columns=["id"], index_cache=None)
    with pytest.raises(DamagedFileError, match="row group 1, column 'id'"):
        ids(dataset)


def test_processes_share_a_cache_while_they_open_at_once(tmp_path: Path) -> None:
    write(tmp_path / "data", 8)
    code = f"""
from farandole import cli
from farandole.data import ParquetDataset
for filters in (None, [("id", ">", 2500)]):
    dataset = ParquetDataset({str(tmp_path / "data")!r}, filters=filters,
                             index_cache={str(tmp_path / "cache")!r})
    print(dataset.num_rows, dataset.fingerprint)
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=100) for process in started]
    assert all(errors == "" for _, errors in outputs)
    assert len({output for output, _ in outputs}) == 1
    assert outputs[0][0].splitlines()[0].startswith("8000 ")
    assert not list((tmp_path / "cache").glob(".new-*"))


def test_on_bad_is_checked() -> None:
    with pytest.raises(DataError, match="on_bad='ignore'; pass 'error' or 'skip'"):
        ParquetDataset("x", on_bad="ignore")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_job_leaves_out_is_in_its_report(tmp_path: Path, workers: int) -> None:
    import farandole as fa
    from farandole.job.rundir import RunDir

    sys.path.insert(0, str(Path(__file__).parent.parent / "jobs"))
    from inline_job import run_inline, sgd, value_of
    from torch import nn

    data = tmp_path / "data"
    write(data)
    cut(data / "1.parquet")
    used: list[int] = []

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(nn.Linear(2, 1), sgd)
        rows = ParquetDataset(data, columns=["id"], features=["x", "y"], on_bad="skip")
        for _ in job.epochs(2):
            for batch in job.loader(rows, batch_size=250):
                job.backward(model(batch.features).mean())
                optimizer.step()
                used.extend(batch["id"].tolist() if job.epoch == 0 else ())

    value_of(run_inline(train, tmp_path, workers=workers))
    events = RunDir(tmp_path / "job").events()
    told = [event["message"] for event in events if event["kind"] == "warning"]
    assert len(told) == 1
    assert "left out of the data" in told[0]
    assert "1.parquet" in told[0]
    assert sorted(used) == [*range(1000), *range(2000, 3000)]


def test_the_command_finds_damage_and_later_opens_know(tmp_path, capsys):
    write(tmp_path / "data")
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 0
    assert "3 files, 12 row groups: all can be decoded" in capsys.readouterr().out
    damage(tmp_path / "data/1.parquet", group=2, column=1)
    assert cli.main(["data", "verify", str(tmp_path / "data"), "--columns", "y"]) == 0
    assert cli.main(["data", "verify", str(tmp_path / "data")]) == 1
    said = capsys.readouterr().out
    assert "1 damaged" in said
    assert "1.parquet" in said
    with pytest.raises(DamagedFileError, match="'x'"):
        ParquetDataset(tmp_path / "data").validate()
    rest = ids(ParquetDataset(tmp_path / "data", on_bad="skip"))
    assert rest == [*range(1500), *range(1750, 3000)]
