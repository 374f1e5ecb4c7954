"""A folder of checkpoints.

A checkpoint is a folder ``step-<number>`` that holds what `torch.distributed.checkpoint` wrote,
and ``manifest.json``: the step, the state's skeleton, and size and SHA-256 of every file. It is
written under a hidden name and renamed when all is on the disk, so it exists whole or not at all;
the manifest finds what a disk or a copy has torn since.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from farandole.checkpoint.tree import empty_tensors
from farandole.errors import CheckpointError

# One writer without a process group is what is meant here. The filter is global because
# warnings cannot be filtered for one thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

FORMAT = 1
_NAME = re.compile(r"step-(\d{10})")
_MANIFEST = "manifest.json"
_REPLACED = ".replaced"


class CheckpointStore:
    """Writes, lists, verifies and reads the checkpoints of one folder. Makes no threads.

    Parameters
    ----------
    folder : Path
        Made when the first checkpoint is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return where the checkpoint after a step lies."""
        return self.folder / f"step-{step:010d}"

    def steps(self) -> list[int]:
        """Return the steps of which there are committed checkpoints, in ascending order."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def write(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        skeleton: Any,
        about: dict[str, Any],
        before_commit: Callable[[], None] | None = None,
    ) -> Path:
        """Write and commit one checkpoint. Blocks until it is on the disk.

        A committed checkpoint of the same step is replaced: it may hold an earlier position of
        the same step (before an evaluation, say). `before_commit` is called when all is written
        but the name; if it raises, nothing is committed.

        Raises
        ------
        CheckpointError
            The disk is full, or the folder cannot be written; nothing half-written is left.
        """
        final = self.path(step)
        temporary = self.folder / f".{final.name}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            _save(tensors, temporary)
            manifest = {
                "format": FORMAT,
                "step": step,
                "about": about,
                "skeleton": skeleton,
                "files": _digests(temporary),
            }
            _write_synced(temporary / _MANIFEST, json.dumps(manifest).encode())
            _sync(temporary)
            if before_commit is not None:
                before_commit()
            _replace_folder(temporary, final)
            _sync(self.folder)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _write_error(final, error) from error
        return final

    def read(self, step: int) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
        """Verify and read one checkpoint: its tensors (on the CPU), skeleton and `about`.

        Raises
        ------
        CheckpointError
            It is torn, was changed, or was not written by this store; says in which way.
        """
        path = self.path(step)
        manifest = self._verified(path, step)
        tensors = empty_tensors(manifest["skeleton"])
        if tensors:
            try:
                _load(tensors, path)
            except Exception as error:
                reason = " ".join(str(list(_causes(error))[-1]).split())
                raise _unusable(path, f"cannot be read ({reason})") from error
        return tensors, manifest["skeleton"], manifest["about"]

    def remove(self, step: int) -> None:
        """Remove one checkpoint: under its name it is there whole or not at all."""
        path = self.path(step)
        doomed = self.folder / f".{path.name}.{os.getpid()}.old"
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint that cannot be used, so that it is none any more; return its path.

        It is kept for whoever wants to know what happened to it. Where it cannot be renamed it
        stays as it is.
        """
        path = self.path(step)
        aside, number = path.with_name(f"refused-{path.name}"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"refused-{path.name}.{number}")
        try:
            return path.rename(aside)
        except OSError:
            return path

    def refused(self) -> list[str]:
        """Return the names of those that were set aside."""
        return sorted(entry.name for entry in self.folder.glob("refused-*"))

    def sweep(self) -> None:
        """Remove what interrupted writes have left. Nobody else may be writing."""
        if not self.folder.is_dir():
            return
        for entry in sorted(self.folder.glob(".step-*")):
            final = self.folder / entry.name.split(".")[1]
            if entry.suffix == _REPLACED and not final.exists():
                entry.rename(final)  # the new one was not in its place yet
            else:
                shutil.rmtree(entry, ignore_errors=True)

    @staticmethod
    def _verified(path: Path, step: int) -> dict[str, Any]:
        try:
            manifest = json.loads((path / _MANIFEST).read_bytes())
            files = dict(manifest["files"])
            found = {"format": manifest["format"], "step": manifest["step"]}
            if not {"skeleton", "about"} <= manifest.keys():
                raise KeyError("skeleton, about")
        except FileNotFoundError:
            raise _unusable(path, "has no manifest, so it was never committed") from None
        except (ValueError, KeyError, TypeError) as error:
            raise _unusable(path, f"has a manifest that cannot be read ({error})") from error
        if found != {"format": FORMAT, "step": step}:
            raise _unusable(path, f"is a foreign one (format and step: {found})")
        for name, (size, digest) in files.items():
            file = path / name
            if not file.is_file():
                raise _unusable(path, f"lacks its file {name}")
            if file.stat().st_size != size:
                raise _unusable(
                    path, f"is torn: {name} has {file.stat().st_size} bytes, not {size}"
                )
            if _sha256(file) != digest:
                raise _unusable(path, f"was changed: {name} has another SHA-256")
        return manifest


# torch.distributed.checkpoint takes a second to import, which a job's start would wait for.


def _save(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, sync_files=True)
    _with_plain_errors(lambda: save(dict(tensors), storage_writer=writer, no_dist=True))


def _load(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    _with_plain_errors(lambda: load(tensors, storage_reader=reader, no_dist=True))


def _with_plain_errors(call: Callable[[], Any]) -> None:
    """Raise what torch packs into an error of its own, which is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    packed: BaseException | None = None
    try:
        call()
    except CheckpointException as error:
        packed, _ = next(iter(error.failures.values()))
    if packed is not None:  # raised in the handler, it would forget what had led to it
        raise packed


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_size, _sha256(file)) for file in files}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(source: Path, target: Path) -> None:
    if not target.exists():
        source.rename(target)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}{_REPLACED}")
    target.rename(old)  # if it ends here, `sweep` brings it back
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _write_error(path: Path, error: BaseException) -> CheckpointError:
    """Find the operating system's word in what torch made of it."""
    told = [e.errno for e in _causes(error) if isinstance(e, OSError) and e.errno is not None]
    text = os.strerror(told[0]) if told else str(error)
    remedy = "make the folder writable"
    if told and told[0] in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space"
    return CheckpointError(
        path=str(path),
        problem=f"cannot be written ({text})",
        remedy=f"{remedy}, then go on with --resume; earlier checkpoints are whole",
    )


def _unusable(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        path=str(path), problem=problem, remedy="remove it; the one before it is used"
    )
