"""The command that is one worker: ``python -m farandole.worker RUN_DIR WORKER_ID``.

Whoever runs it, on any engine, adds a worker to a job. With several workers it is told where
the coordinator is, and the job's secret, by two variables of its environment.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

COORDINATOR_VARIABLE = "FARANDOLE_COORDINATOR"
SECRET_VARIABLE = "FARANDOLE_SECRET"


def main(argv: list[str]) -> int:
    """Run a worker; return its exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Taken out, so that neither the training function nor a child of it can print the secret.
    coordinator = os.environ.pop(COORDINATOR_VARIABLE, None)
    secret = os.environ.pop(SECRET_VARIABLE, "").encode()
    from farandole.job.runtime import Place, run_worker

    return run_worker(Place(Path(argv[1]), int(argv[2]), coordinator, secret))


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that a training function left behind must not keep the worker alive.
    os._exit(code)
