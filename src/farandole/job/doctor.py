"""What is installed, what can be used, and what is wrong on this machine."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from farandole.errors import FarandoleError
from farandole.extras import Kind, known_names, load_named
from farandole.job.rundir import RunDir

CORE_PACKAGES = ("cloudpickle", "numpy", "pyarrow", "pydantic", "pyyaml", "rich", "typer")
IMPORT_TIMEOUT_S = 120.0
SHARED_BYTES = 1 << 20
LOW_MEMORY_BYTES = 2 << 30

_TORCH_CODE = (
    "import torch; print(torch.__version__, torch.backends.cpu.get_cpu_capability(), "
    "torch.cuda.device_count() if torch.cuda.is_available() else 0)"
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    `warn` is what only some jobs need, `fail` what every training job needs.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


def diagnose(runs: Path) -> list[Check]:
    """Look at everything that a job on this machine needs. Blocks for a few seconds.

    Parameters
    ----------
    runs : Path
        The folder of the run directories.
    """
    checks = [
        _python(),
        _packages(),
        _guarded("torch", _torch),
        _guarded("cores", _cores),
        _guarded("memory", _memory),
        _guarded("shared memory", _shared_memory),
        _guarded("sockets", _sockets),
        _guarded("run directories", lambda: _runs(runs)),
        _optional("matplotlib", "report", "the picture of a report"),
    ]
    for kind in ("engine", "tracker"):
        names = known_names(kind)
        checks += [_named(kind, name) for name in names]
        if not names:
            detail = f"no {kind} is registered; is farandole installed (pip install)?"
            checks.append(Check(f"{kind}s", "fail" if kind == "engine" else "warn", detail))
    return checks + _old_mlflow_store(runs)


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    """Turn what a look raises into its result: a doctor must not fall ill."""
    try:
        return look()
    except (OSError, ValueError, subprocess.SubprocessError, FarandoleError) as error:
        return Check(name, "fail", str(error))


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _packages() -> Check:
    found: list[str] = []
    missing: list[str] = []
    for package in ("farandole", *CORE_PACKAGES):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        detail = f"missing: {', '.join(missing)}; run: pip install farandole"
        return Check("packages", "fail", detail)
    return Check("packages", "ok", ", ".join(found))


def _torch() -> Check:
    try:
        version("torch")
    except PackageNotFoundError:
        detail = "not installed, and training needs it; run: pip install 'farandole[torch]'"
        return Check("torch", "fail", detail)
    # In a process of its own: a broken build ends the process, and this one stays small.
    done = subprocess.run(
        [sys.executable, "-c", _TORCH_CODE],
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check("torch", "fail", f"installed, but cannot be imported: {last}")
    name, capability, num_gpus = done.stdout.split()[-3:]
    return Check("torch", "ok", f"{name}, CPU capability {capability}, {num_gpus} GPUs")


def _cores() -> Check:
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{usable} usable" + (f" of {all_cores}" if usable != all_cores else "")
    return Check("cores", "ok", detail)


def _memory() -> Check:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line[:13] == "MemAvailable:")
    status = "warn" if available < LOW_MEMORY_BYTES else "ok"
    return Check("memory", status, f"{available / (1 << 30):.1f} GiB available")


def _shared_memory() -> Check:
    try:
        descriptor = os.memfd_create("farandole-doctor")
        try:
            os.ftruncate(descriptor, SHARED_BYTES)
            with mmap.mmap(descriptor, SHARED_BYTES) as memory:
                memory[0] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        detail = f"memfd does not work ({error}); workers must use --transport network"
        return Check("shared memory", "warn", detail)
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        return Check("shared memory", "warn", "memfd works; /dev/shm cannot be written")
    free = shutil.disk_usage(shm).free / (1 << 20)
    return Check("shared memory", "ok", f"memfd works; {free:,.0f} MiB free in /dev/shm")


def _sockets() -> Check:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    return Check("sockets", "ok", f"loopback works; host name {socket.gethostname()}")


def _runs(runs: Path) -> Check:
    """See whether run directories can be made and locked, in the nearest folder that exists."""
    folder = runs.absolute()
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.TemporaryDirectory(prefix=".farandole-doctor-", dir=folder) as scratch:
        run = RunDir(scratch)
        with run.lock():
            if run.lock_holder() != os.getpid():
                detail = f"{folder}: file locks have no effect there; give another --runs"
                return Check("run directories", "fail", detail)
    free = shutil.disk_usage(folder).free / (1 << 30)
    return Check("run directories", "ok", f"{runs.absolute()}, {free:.1f} GiB free")


def _optional(package: str, extra: str, purpose: str) -> Check:
    try:
        return Check(package, "ok", version(package))
    except PackageNotFoundError:
        detail = f"not installed; {purpose} needs it: pip install 'farandole[{extra}]'"
        return Check(package, "warn", detail)


def _named(kind: Kind, name: str) -> Check:
    try:
        found = load_named(kind, name)
    except (FarandoleError, ImportError, AttributeError) as error:
        return Check(f"{kind} {name}", "warn", str(error))
    package = found.__module__.split(".")[0]
    source = "" if package == "farandole" else f", from {package}"
    return Check(f"{kind} {name}", "ok", f"usable{source}")


def _old_mlflow_store(runs: Path) -> list[Check]:
    """Warn of folders of MLflow's old file store, which MLflow no longer reads."""
    found = [path for path in (Path("mlruns"), runs / "mlruns") if (path / "0").is_dir()]
    detail = "a file store, which MLflow no longer reads; farandole records in mlflow.db"
    return [Check(f"{path}/", "warn", detail) for path in found]
