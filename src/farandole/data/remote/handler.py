"""A store as a pyarrow file system, whose files are read ahead."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from farandole.data.remote.ranges import BLOCK_BYTES, REQUEST_BYTES, Ranges, Run
from farandole.data.remote.store import File, Store, result_of

_MIN_AHEAD_BYTES = 1 << 20
_MAX_AHEAD_BYTES = 64 << 20
_MAX_EXTRA = 2
_MAX_PREPARED = 64


class AheadBudget:
    """Memory for what is read ahead, shared by the files that are open."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_open = 0
        self._lock = threading.Lock()

    @property
    def share_bytes(self) -> int:
        """What one file may read ahead at present."""
        share = self._num_bytes // max(self._num_open, 1)
        return min(max(share, _MIN_AHEAD_BYTES), _MAX_AHEAD_BYTES)

    def opened(self, change: int) -> None:
        """Count a file that is opened (1) or closed (-1)."""
        with self._lock:
            self._num_open += change


@dataclass(eq=False)
class _Held:
    """A run that was asked for, and how much of it is yet to be read."""

    run: Run
    unread_bytes: int
    data: Future[memoryview]


class RemoteFile(io.RawIOBase):
    """A file of a store, read ahead by what is known of its use. For one thread.

    Parameters
    ----------
    store : Store
    file : File
    budget : AheadBudget
    ranges : Ranges, optional
        What will be read. Anything else can be, but is not asked for ahead.
    """

    def __init__(
        self, store: Store, file: File, budget: AheadBudget, ranges: Ranges | None = None
    ) -> None:
        super().__init__()
        self._store = store
        self._file = file
        self._budget = budget
        self._at = 0
        self._blocks: dict[int, _Held] = {}
        self._extra: deque[_Held] = deque(maxlen=_MAX_EXTRA)
        self._ahead_bytes = 0
        budget.opened(1)
        self._runs = deque(ranges.runs(budget.share_bytes) if ranges else ())
        self._ask_ahead()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place. To find the end may block."""
        if whence == io.SEEK_END:
            self._at = self._store.version(self._file).size_bytes + offset
        else:
            self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def read(self, size: int = -1, /) -> Any:
        """Return the next bytes, without a copy where they came together. Blocks."""
        end = self._store.version(self._file).size_bytes
        stop = end if size is None or size < 0 else min(self._at + size, end)
        pieces: list[memoryview] = []
        while self._at < stop:
            held = self._find(stop)
            data = result_of(held.data)
            first = self._at - held.run.first * BLOCK_BYTES
            piece = data[first : first + stop - self._at]
            pieces.append(piece)
            self._at += len(piece)
            held.unread_bytes -= len(piece)
            if held.unread_bytes <= 0:
                self._drop(held)
                self._ask_ahead()
        if len(pieces) == 1:
            return pieces[0]
        return b"".join(pieces)

    def close(self) -> None:
        """Drop what was read ahead, and take back what was not yet asked for."""
        if not self.closed:
            self._budget.opened(-1)
            for held in [*self._blocks.values(), *self._extra]:
                held.data.cancel()
            self._runs.clear()
            self._blocks.clear()
            self._extra.clear()
        super().close()

    def _ask_ahead(self) -> None:
        share = self._budget.share_bytes
        while self._runs and (self._ahead_bytes < share or not self._blocks):
            self._ask(self._runs.popleft())

    def _ask(self, run: Run) -> _Held:
        self._ahead_bytes += run.num_bytes
        held = _Held(run, run.wanted_bytes, self._store.fetch(self._file, run))
        self._blocks.update(dict.fromkeys(range(run.first, run.stop), held))
        return held

    def _find(self, stop: int) -> _Held:
        """Return the run that holds the next byte; ask for it if nobody did."""
        block = self._at // BLOCK_BYTES
        if block in self._blocks:
            return self._blocks[block]
        for run in self._runs:
            if run.first <= block < run.stop:
                self._runs.remove(run)
                return self._ask(run)
        for held in self._extra:
            if held.run.first <= block < held.run.stop:
                return held
        end = min(-(-stop // BLOCK_BYTES), block + REQUEST_BYTES // BLOCK_BYTES)
        run = Run(block, end, (end - block) * BLOCK_BYTES)
        self._extra.append(_Held(run, run.wanted_bytes, self._store.fetch(self._file, run)))
        return self._extra[-1]

    def _drop(self, held: _Held) -> None:
        if held in self._extra:
            self._extra.remove(held)
            return
        self._ahead_bytes -= held.run.num_bytes
        for block in range(held.run.first, held.run.stop):
            self._blocks.pop(block, None)


class RemoteHandler(pafs.FileSystemHandler):
    """Reads by a `Store`; all else goes to the file system that was wrapped.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
    store : Store
    ahead_bytes : int
        Memory for what is read ahead in all files together.
    """

    def __init__(self, filesystem: pafs.FileSystem, store: Store, ahead_bytes: int) -> None:
        self.filesystem = filesystem
        self._store = store
        self._budget = AheadBudget(ahead_bytes)
        self._prepared: OrderedDict[tuple[str, Ranges], RemoteFile] = OrderedDict()
        self._lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteHandler):
            return self.filesystem.equals(other.filesystem)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def get_type_name(self) -> str:
        """Return a name for the kind of file system."""
        return f"farandole+{self.filesystem.type_name}"

    def normalize_path(self, path: str) -> str:
        """Return the path as the store has it."""
        return self.filesystem.normalize_path(path)

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        """Return what paths are. Blocks."""
        first = next(iter(paths), "")
        return self._noted(self._store.ask(first, lambda: self.filesystem.get_file_info(paths)))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return what a folder holds. Blocks."""
        base = selector.base_dir
        return self._noted(self._store.ask(base, lambda: self.filesystem.get_file_info(selector)))

    def version(self, path: str) -> str:
        """Return the store's mark of a file's version, empty if it has none. Blocks."""
        return self._store.version(self._store.file(path)).tag

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file of which nothing is read ahead. Does not block."""
        return self.open_ranges(path, None)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file of which nothing is read ahead. Does not block."""
        return self.open_ranges(path, None)

    def open_ranges(self, path: str, ranges: Ranges | None) -> pa.NativeFile:
        """Open a file and begin to read what will be wanted of it. Does not block."""
        opened = None
        if ranges is not None:
            with self._lock:
                opened = self._prepared.pop((path, ranges), None)
        return pa.PythonFile(opened or self._made(path, ranges), mode="r")

    def prepare(self, path: str, ranges: Ranges) -> None:
        """Begin to read what `open_ranges` will be called for. Does not block.

        Of what nobody opens, the last few are kept until the data set is dropped.
        """
        dropped = None
        with self._lock:
            if (path, ranges) not in self._prepared:
                self._prepared[path, ranges] = self._made(path, ranges)
            if len(self._prepared) > _MAX_PREPARED:
                _, dropped = self._prepared.popitem(last=False)
        if dropped is not None:
            dropped.close()

    def _made(self, path: str, ranges: Ranges | None) -> RemoteFile:
        return RemoteFile(self._store, self._store.file(path), self._budget, ranges)

    def _noted(self, infos: list[pafs.FileInfo]) -> list[pafs.FileInfo]:
        for info in infos:
            if info.type == pafs.FileType.File:
                self._store.expect(info.path, info.size)
        return infos

    # --- not needed for reading -----------------------------------------------------------

    def create_dir(self, path: str, recursive: bool) -> None:
        """Make a folder."""
        self.filesystem.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder."""
        self.filesystem.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Empty a folder."""
        self.filesystem.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Empty everything."""
        self.filesystem.delete_dir_contents("/", accept_root_dir=True)

    def delete_file(self, path: str) -> None:
        """Delete a file."""
        self.filesystem.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Rename a file or folder."""
        self.filesystem.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file."""
        self.filesystem.copy_file(src, dest)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open a file to write it."""
        return self.filesystem.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open a file to add to it."""
        return self.filesystem.open_append_stream(path, metadata=metadata)


def remote_handler(filesystem: pafs.FileSystem) -> RemoteHandler | None:
    """Return what reads a remote file system, None for another one."""
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    return handler if isinstance(handler, RemoteHandler) else None
