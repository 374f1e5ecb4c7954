"""What this machine is: its name, cores, folder for caches, and what decides its arithmetic."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNKNOWN = "unknown"


def host_name() -> str:
    """Return the name of this host, for people."""
    return socket.gethostname()


def host_id() -> str:
    """Return 16 hex digits that are alike where processes can share files, sockets and memory.

    They differ between hosts, between boots, and between containers or namespaces on one host.
    """
    parts = [host_name(), _read(Path("/proc/sys/kernel/random/boot_id"))]
    for namespace in ("ipc", "mnt", "net"):
        try:
            parts.append(str(Path("/proc/self/ns", namespace).readlink()))
        except OSError:
            parts.append("")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def user_cache_dir() -> Path | None:
    """Return the folder below which what can be made anew is kept, or None without a home.

    ``$XDG_CACHE_HOME/farandole``, or ``~/.cache/farandole``.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():  # as the XDG specification has it
        return Path(given) / "farandole"
    try:
        return Path.home() / ".cache" / "farandole"
    except RuntimeError:
        return None


def available_cores() -> int:
    """Return the whole cores that this process may use: its affinity, or its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota(_CGROUP_ROOT, _read(Path("/proc/self/cgroup")))
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota(root: Path, membership: str) -> float | None:
    """Return the least CPU quota, in cores, of a process's cgroup (v2) and those above it.

    Parameters
    ----------
    root : Path
        Where cgroups are mounted.
    membership : str
        Contents of ``/proc/<pid>/cgroup``.
    """
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    if own is None:
        return None
    group = root / own.lstrip("/")
    quotas: list[float] = []
    for folder in [group, *group.parents]:
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
        if folder == root:
            break
    return min(quotas, default=None)


@dataclass(frozen=True)
class NumericsFingerprint:
    """What decides the bits of a result, beside the job itself."""

    threads: int
    """Intra-op threads per worker."""
    torch_version: str
    cpu_capability: str
    """Instruction set that torch uses, such as ``AVX512``."""
    cpu_model: str
    device: str
    """``cpu``, or the model of the accelerator."""

    def to_dict(self) -> dict[str, int | str]:
        """Return the fields by name, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int | str]) -> NumericsFingerprint:
        """Make one from `to_dict`'s result; a field that an older version lacks is unknown."""
        known = {field.name: data.get(field.name, _UNKNOWN) for field in dataclasses.fields(cls)}
        return cls(**known)  # pyright: ignore[reportArgumentType]

    def differences(self, other: NumericsFingerprint) -> list[str]:
        """Return one phrase for each field in which the two differ."""
        theirs = other.to_dict()
        return [
            f"{name} is {mine} here, {theirs[name]} there"
            for name, mine in self.to_dict().items()
            if mine != theirs[name]
        ]


def numerics_fingerprint(
    *, threads: int, torch_version: str, cpu_capability: str, device: str = "cpu"
) -> NumericsFingerprint:
    """Return this worker's fingerprint; what only torch knows is given in by the caller."""
    return NumericsFingerprint(threads, torch_version, cpu_capability, _cpu_model(), device)


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine() or _UNKNOWN


def _read(path: Path) -> str:
    """Return a small file's text without the last newline, or nothing if it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
