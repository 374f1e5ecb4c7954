"""What a job runs on, and which code it runs, as far as the machine tells."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 5.0


def environment() -> dict[str, Any]:
    """Return Python, platform and the versions of all packages; no environment variable."""
    packages = {d.name: d.version for d in importlib.metadata.distributions()}
    return {
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of a folder's repository and whether it has changes; nulls without one."""
    commit = _git_output(folder, "rev-parse", "HEAD")
    changes = _git_output(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": commit.strip() if commit else None,
        "git_dirty": None if changes is None else bool(changes.strip()),
    }


def _git_output(folder: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
