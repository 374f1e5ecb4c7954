"""How busy the host and a job's processes are, from `/proc`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROC = Path("/proc")
MEGABYTE = 1 << 20

# Names as MLflow's own monitor gives them, so that its pages show them.
CPU = "system/cpu_utilization_percentage"
MEMORY = "system/system_memory_usage_megabytes"
MEMORY_SHARE = "system/system_memory_usage_percentage"
JOB_MEMORY = "system/job_memory_usage_megabytes"


class HostSampler:
    """Samples the host, and one process with all its descendants.

    Parameters
    ----------
    pid : int
        The process; the job's launcher.
    proc : Path
        Where the proc file system is.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid = pid
        self._proc = proc
        self._last = self._cpu_times()

    def sample(self) -> dict[str, float]:
        """Return the values since the last call, in percent and megabytes (2**20 bytes).

        A job's memory is the resident memory of its processes, added up: pages that several
        of them share count in each.
        """
        busy, total = self._cpu_times()
        busy_delta, total_delta = busy - self._last[0], total - self._last[1]
        self._last = busy, total
        memory = self._memory()
        used = memory["MemTotal"] - memory["MemAvailable"]
        values = {
            MEMORY: used / 1024,
            MEMORY_SHARE: 100 * used / memory["MemTotal"],
            JOB_MEMORY: self._job_memory_bytes() / MEGABYTE,
        }
        if total_delta > 0:
            values[CPU] = 100 * busy_delta / total_delta
        return values

    def _cpu_times(self) -> tuple[int, int]:
        """Return busy and total time of all cores, in ticks."""
        line = (self._proc / "stat").read_text().split("\n", 1)[0]
        # user nice system idle iowait irq softirq steal; guest times are within user and nice
        times = [int(field) for field in line.split()[1:9]]
        return sum(times) - times[3] - times[4], sum(times)

    def _memory(self) -> dict[str, int]:
        """Return the host's memory by name, in kilobytes."""
        lines = (self._proc / "meminfo").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines)
        return {name: int(value.split()[0]) for name, value in pairs}

    def _job_memory_bytes(self) -> int:
        children: dict[int, list[int]] = {}
        pages: dict[int, int] = {}
        for folder in self._proc.iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has just ended
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
                children.setdefault(parent, []).append(int(folder.name))
        total, left = 0, [self._pid]
        while left:
            pid = left.pop()
            total += pages.get(pid, 0)
            left += children.get(pid, [])
        return total * os.sysconf("SC_PAGE_SIZE")
