"""Which store a path means, and how to get in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from farandole.data.remote.diskcache import DiskCache
from farandole.data.remote.handler import RemoteHandler
from farandole.data.remote.retry import RetryPolicy
from farandole.data.remote.sources import ArrowSource, FsspecSource
from farandole.data.remote.store import Store
from farandole.errors import (
    ConfigError,
    ConfigProblem,
    DataError,
    MissingExtraError,
    without_credentials,
)

PathLike = str | Path

DEFAULT_CACHE_BYTES = 32 << 30
MIN_CACHE_BYTES = 64 << 20
_NUM_REQUESTS = 16
_MAX_REQUESTS = 256
_AHEAD_BYTES = 256 << 20
_SECRET = re.compile(r"key|secret|token|password|passwd|credential|sas|signature|auth|connection")
_HIDDEN = "***"
_MIN_SECRET = 4
_S3_QUERY = {"region", "scheme", "endpoint_override", "tls_ca_file_path"}
_S3_TIMEOUTS = {"connect_timeout": 5.0, "request_timeout": 10.0}
_SCHEMES = {
    "s3": "pyarrow.fs.S3FileSystem",
    "gs": "pyarrow.fs.GcsFileSystem",
    "gcs": "pyarrow.fs.GcsFileSystem",
    "abfs": "pyarrow.fs.AzureFileSystem",
    "abfss": "pyarrow.fs.AzureFileSystem",
    "hdfs": "pyarrow.fs.HadoopFileSystem",
    "viewfs": "pyarrow.fs.HadoopFileSystem",
}


@dataclass(frozen=True, repr=False)
class Storage:
    """How to reach files that are not on the local disk. Makes no connection by itself.

    It is pickled only on the way to a child process if it may hold secrets, as
    `multiprocessing` does with its own: what is pickled else may come to lie in a file.

    Parameters
    ----------
    options : mapping, optional
        Arguments of the store's file system, and `num_requests` and `deadline_s`.
    filesystem : pyarrow.fs.FileSystem or fsspec.AbstractFileSystem, optional
        Instead of what the paths' scheme means.
    cache_dir : Path, optional
        Folder on the local disk for blocks that were read.
    cache_bytes : int
        Limit of that folder.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    filesystem: Any = None
    cache_dir: Path | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES

    def __post_init__(self) -> None:
        problems: list[ConfigProblem] = []
        num, deadline_s = self.num_requests, self.deadline_s
        if type(num) is not int or not 1 <= num <= _MAX_REQUESTS:
            expected = f"a whole number from 1 to {_MAX_REQUESTS}"
            problems.append(_problem("storage_options.num_requests", num, expected))
        if type(deadline_s) not in (int, float) or not deadline_s > 0:
            problems.append(_problem("storage_options.deadline_s", deadline_s, "seconds above 0"))
        if type(self.cache_bytes) is not int or self.cache_bytes < MIN_CACHE_BYTES:
            expected = f"a whole number from {MIN_CACHE_BYTES} ({MIN_CACHE_BYTES >> 20} MiB) up"
            problems.append(_problem("cache_bytes", self.cache_bytes, expected))
        if self.filesystem is not None and self._arguments:
            names = ", ".join(sorted(self._arguments))
            expected = "nothing beside filesystem=, which has its own options"
            problems.append(_problem("storage_options", names, expected))
        if problems:
            raise ConfigError(problems=tuple(problems))

    @property
    def is_local(self) -> bool:
        """Whether paths that are no URLs are on the local disk."""
        return self.filesystem is None or _is_local(self.filesystem)

    @property
    def num_requests(self) -> int:
        """Limit on requests in flight in this process."""
        return self.options.get("num_requests", _NUM_REQUESTS)

    @property
    def deadline_s(self) -> float:
        """How long one read may fail."""
        return self.options.get("deadline_s", RetryPolicy.deadline_s)

    @property
    def _arguments(self) -> dict[str, Any]:
        ours = ("num_requests", "deadline_s")
        return {name: value for name, value in self.options.items() if name not in ours}

    def __repr__(self) -> str:
        return f"Storage({sorted(self.options)})"

    def __reduce__(self) -> tuple[Any, ...]:
        holds_secrets = self.filesystem is not None or bool(_secrets(self.options))
        if holds_secrets and get_spawning_popen() is None:
            raise DataError(
                path="storage_options=" if self.filesystem is None else "filesystem=",
                problem="holds credentials, and a data set with them cannot be saved or sent",
                remedy="make the data set within the training function, or leave credentials to "
                "where the store's own tools look for them (the environment, files, roles)",
            )
        return type(self), (self.options, self.filesystem, self.cache_dir, self.cache_bytes)

    def redact(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in _secrets(self.options):
            if len(secret) >= _MIN_SECRET:  # shorter ones would hide the message
                text = text.replace(secret, _HIDDEN)
        return without_credentials(text)


def _problem(key: str, value: Any, expected: str) -> ConfigProblem:
    return ConfigProblem(key=key, value=value, expected=expected)


def _secrets(options: Mapping[str, Any]) -> list[str]:
    """Return the values that must not be shown, the longest first."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _secrets({f"{name}.{inner}": value[inner] for inner in value})
        elif isinstance(value, str) and _SECRET.search(name.lower()):
            found.append(value)
        elif not isinstance(value, str | int | float | bool | None):
            found.append(repr(value))  # who knows what an object holds
    return sorted(found, key=len, reverse=True)


def split_credentials(
    paths: PathLike | Sequence[PathLike], options: Mapping[str, Any] | None
) -> tuple[PathLike | list[PathLike], dict[str, Any]]:
    """Move ``user:password@`` of S3 URLs into options, where they are kept out of sight."""
    merged = dict(options or {})
    single = isinstance(paths, str | Path)
    cleaned: list[PathLike] = []
    for path in [paths] if single else paths:
        if isinstance(path, str) and path.startswith("s3://"):
            user, at, host = urlsplit(path).netloc.rpartition("@")
            if at:
                key, _, secret = user.partition(":")
                merged.setdefault("access_key", unquote(key))
                merged.setdefault("secret_key", unquote(secret))
                path = path.replace(f"{user}@{host}", host, 1)
        cleaned.append(path)
    return (cleaned[0] if single else cleaned), merged


class Resolver:
    """Gives the file system of each path; equal ones only once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._made: list[pafs.PyFileSystem] = []

    def __call__(self, name: str) -> tuple[pafs.FileSystem, str]:
        """Return the file system that a path is on, and the path in it. Blocks, perhaps.

        Raises
        ------
        DataError
            If the URL or the options are wrong.
        MissingExtraError
            If the scheme needs fsspec or a package for it.
        """
        given = None if self._storage.is_local else self._storage.filesystem
        if given is None and "://" not in name:
            return pafs.LocalFileSystem(), Path(name).expanduser().absolute().as_posix()
        scheme, separator, rest = name.partition("://")
        if not separator:
            scheme, rest = "", name
        try:
            if given is not None:
                filesystem, path = given, rest
            elif scheme in _SCHEMES or scheme == "file":
                filesystem, path = self._native(scheme, name)
            else:
                filesystem, path = self._by_fsspec(scheme, name)
        except (OSError, ValueError, TypeError, pa.ArrowException) as error:
            kind = _SCHEMES.get(scheme)
            takes = f"; {scheme}:// takes the arguments of {kind}" if kind else ""
            raise DataError(
                path=without_credentials(name),
                problem=self._storage.redact(str(error).partition("\n")[0]),
                remedy=f"check the URL and storage_options={takes}",
            ) from None
        if isinstance(filesystem, pafs.LocalFileSystem):
            return filesystem, path
        return self._wrapped(filesystem, f"{scheme or _kinds(filesystem)[0]}://"), path

    def _native(self, scheme: str, name: str) -> tuple[pafs.FileSystem, str]:
        options = self._storage._arguments
        if scheme == "s3":
            return _s3(name, options)
        if not options:
            return _from_uri(name)
        parts = urlsplit(name)
        path = unquote(parts.netloc + parts.path)
        if scheme in ("gs", "gcs"):
            return pafs.GcsFileSystem(**options), path
        if scheme in ("hdfs", "viewfs"):
            place = {"host": parts.hostname or "default", "port": parts.port or 0}
            return pafs.HadoopFileSystem(**{**place, **options}), unquote(parts.path)
        container, at, host = parts.netloc.rpartition("@")
        account = {"account_name": host.partition(".")[0]} if at else {}
        path = unquote((container if at else host) + parts.path)
        return pafs.AzureFileSystem(**{**account, **options}), path

    def _by_fsspec(self, scheme: str, name: str) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise MissingExtraError(
                extra="fsspec", package="fsspec", purpose=f"reading {scheme}://"
            ) from None
        try:
            return url_to_fs(name, **self._storage._arguments)
        except ImportError as error:
            raise DataError(
                path=without_credentials(name),
                problem=str(error),
                remedy="install the package of fsspec for this store",
            ) from None

    def _wrapped(self, given: Any, prefix: str) -> pafs.FileSystem:
        is_arrow = isinstance(given, pafs.FileSystem)
        filesystem = given if is_arrow else pafs.PyFileSystem(pafs.FSSpecHandler(given))
        for made in self._made:
            if made.handler.filesystem.equals(filesystem):
                return made
        storage = self._storage
        folder = storage.cache_dir
        store = Store(
            ArrowSource(filesystem) if is_arrow else FsspecSource(given),
            prefix=prefix,
            num_requests=storage.num_requests,
            policy=RetryPolicy(deadline_s=storage.deadline_s),
            cache=None if folder is None else DiskCache(folder, storage.cache_bytes),
            redact=storage.redact,
        )
        made = pafs.PyFileSystem(RemoteHandler(filesystem, store, _AHEAD_BYTES))
        self._made.append(made)
        return made


def _from_uri(name: str) -> tuple[pafs.FileSystem, str]:
    """Return what pyarrow makes of a URL, in which spaces and the like need not be quoted."""
    try:
        return pafs.FileSystem.from_uri(name)
    except pa.ArrowInvalid as error:
        scheme, _, rest = name.partition("://")
        quoted = f"{scheme}://{quote(rest, safe='/:@?&=%+,')}"
        if "Cannot parse URI" not in str(error) or quoted == name:
            raise
        return pafs.FileSystem.from_uri(quoted)


def _s3(name: str, options: Mapping[str, Any]) -> tuple[pafs.FileSystem, str]:
    """Return S3 and the path in it, with one attempt for each request: we repeat them."""
    path, _, query = name.removeprefix("s3://").partition("?")
    told = dict(parse_qsl(query))
    if not told or not told.keys() <= _S3_QUERY:  # a pattern
        path, told = name.removeprefix("s3://"), {}
    path = unquote(path)
    arguments: dict[str, Any] = {**_S3_TIMEOUTS, **told, **options}
    if "region" not in arguments and "endpoint_override" not in arguments:
        arguments["region"] = pafs.resolve_s3_region(path.partition("/")[0])
    arguments.setdefault("retry_strategy", pafs.AwsStandardS3RetryStrategy(max_attempts=1))
    return pafs.S3FileSystem(**arguments), path


def _is_local(filesystem: Any) -> bool:
    return isinstance(filesystem, pafs.LocalFileSystem) or "file" in _kinds(filesystem)


def _kinds(filesystem: Any) -> tuple[str, ...]:
    """Return the names of a file system's kind, the first one to be shown."""
    if isinstance(filesystem, pafs.FileSystem):
        return (filesystem.type_name,)
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
