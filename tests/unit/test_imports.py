"""What importing costs, and the names that are promised."""

from __future__ import annotations

import subprocess
import sys

import pytest

import farandole

HEAVY = ("torch", "mlflow", "pandas", "matplotlib", "sklearn", "pyarrow", "numpy")
MAX_IMPORT_S = 0.2


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def loaded_after(code: str) -> set[str]:
    out = python(f"import sys; {code}; print(*sys.modules)").stdout
    return {name for name in HEAVY if name in out.split()}


def test_import_is_fast():
    def once() -> float:
        report = python("import farandole", "-X", "importtime").stderr.splitlines()
        line = next(line for line in report if line.split("|")[-1].strip() == "farandole")
        return int(line.split("|")[1]) / 1e6

    assert min(once() for _ in range(3)) < MAX_IMPORT_S


@pytest.mark.parametrize("module", ["farandole", "farandole.cli", "farandole.config"])
def test_import_loads_nothing_heavy(module):
    assert loaded_after(f"import {module}") == set()


@pytest.mark.parametrize(
    "module",
    [
        "farandole.job.launch",
        "farandole.job.doctor",
        "farandole.job.progress",
        "farandole.job.rundir",
        "farandole.protocols",
        "farandole.extras",
    ],
)
def test_the_launcher_loads_neither_torch_nor_an_adapters_library(module):
    assert not loaded_after(f"import {module}") & {"torch", "mlflow", "pandas", "matplotlib"}


def test_public_names():
    # A ratchet: a name that is added or taken away is a promise made or broken. See CHANGES.md.
    assert sorted(farandole.__all__) == [
        "ArrayDataset",
        "Batch",
        "Job",
        "JobConfig",
        "Masked",
        "ParquetDataset",
        "Preprocessor",
        "Ragged",
        "Result",
        "__version__",
        "arrow",
        "balance",
        "coded",
        "dataset",
        "decode",
        "errors",
        "filled",
        "fit_vocabulary",
        "from_delta",
        "from_iceberg",
        "hashed",
        "load_model",
        "masked",
        "mix",
        "npy",
        "padded",
        "rewrite",
        "run",
        "scaled_int",
    ]
    assert dir(farandole) == sorted(farandole.__all__)


@pytest.mark.parametrize("name", farandole.__all__)
def test_every_public_name_is_there(name):
    assert getattr(farandole, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = farandole.nonsense


def test_without_torch_the_remedy_is_named():
    code = "import sys; sys.modules['torch'] = None\nimport farandole as fa\nprint(fa.JobConfig)\n"
    python(code)
    code += (
        "try:\n    fa.Job\nexcept fa.errors.MissingExtraError as error:\n    print(error)\n"
        "else:\n    raise SystemExit(1)"
    )
    assert "pip install 'farandole[torch]'" in python(code).stdout
