from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.errors import TargetError
from farandole.job.target import Target, check_function, check_target, load_target


@pytest.fixture(autouse=True)
def _same_modules_after(monkeypatch):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "job_file.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_function_is_found_without_running_the_file(tmp_path):
    path = write(tmp_path, "raise SystemExit('it ran')\ndef train(job, lr=1): ...\n")
    assert check_target(str(path), {"lr": 2}) == Target(path, "train")
    assert check_target(f"{path}:train") == Target(path, "train")


def test_a_relative_path_becomes_absolute(tmp_path, monkeypatch):
    write(tmp_path, "def fit(job): ...\n")
    monkeypatch.chdir(tmp_path)
    assert check_target("job_file.py:fit").path == tmp_path / "job_file.py"


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("def train(job): ...", "job_fil.py", r"no file.*did you mean .*job_file\.py"),
        ("def train(job): ...", "other/x.py", "no file"),
        ("def train(job): ...", "job_file.py:", "is no target"),
        ("def train(job): ...", "job_file.py:a b", "is no target"),
        ("def train(job): ...", "job_file.txt", "not a Python file"),
        ("def train(job: ...", "job_file.py", "syntax error in line 1"),
        ("a = 1\0", "job_file.py", "not a Python file|syntax error"),
        ("def train(job): ...", "job_file.py:tarin", "did you mean 'train'"),
        ("def fit(job): ...", "job_file.py", "the file has fit"),
        ("x: int = 1", "job_file.py", r"define train\(job"),
        ("def train(): ...", "job_file.py", "takes no job"),
        ("def train(*, job): ...", "job_file.py", "takes no job"),
        ("async def train(job): ...", "job_file.py", "asynchronous"),
    ],
)
def test_what_cannot_be_used(tmp_path, monkeypatch, text, target, said):
    write(tmp_path, text)
    (tmp_path / "job_file.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=said):
        check_target(target)


SIGNATURES = [
    ("job, learning_rate=1", {"learning_rat": 2}, "did you mean 'learning_rate'"),
    ("job, a=1, *, b=2", {"zzz": 2}, "its parameters are a, b"),
    ("job", {"zzz": 2}, "it has none"),
    ("job, path, n=1", {}, "needs a value for path"),
    ("job, *, path", {}, "needs a value for path"),
    ("job", {"job": 1}, "takes the job"),
]


@pytest.mark.parametrize(("signature", "params", "said"), SIGNATURES)
def test_parameters_are_judged_alike_by_file_and_by_function(tmp_path, signature, params, said):
    path = write(tmp_path, f"def train({signature}): ...\n")
    with pytest.raises(TargetError, match=said):
        check_target(str(path), params)
    with pytest.raises(TargetError, match=said):
        check_function(getattr(load_target_without_check(path), "train"), params)  # noqa: B009


def load_target_without_check(path: Path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("judged", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "def train(job, **settings): ...",
        "def train(*args, x=1): ...",
        "from other import train",
        "from other import *",
        "train = make()",
        "class train: ...",
        "@wrap\ndef train(): ...",
        "try:\n    import x\nexcept ImportError:\n    def train(job, x): ...",
    ],
)
def test_what_only_running_the_file_could_tell_is_left_to_the_worker(tmp_path, text):
    path = write(tmp_path, text)
    assert check_target(str(path), {"x": 1}).function == "train"


def test_loading_a_script(tmp_path):
    write(tmp_path, "VALUE = 5\n", "beside_it.py")
    text = "from beside_it import VALUE\ndef train(job): return __name__, VALUE\n"
    path = write(tmp_path, text)
    function = load_target(Target(path, "train"))
    assert function(None) == ("job_file", 5)
    assert load_target(Target(path, "train")) is function


def test_a_file_named_like_a_module_replaces_none(tmp_path):
    path = write(tmp_path, "def train(job): return 1\n", "json.py")
    import json

    assert load_target(Target(path, "train"))(None) == 1
    assert sys.modules["json"] is json


def test_loading_a_file_in_a_package(tmp_path):
    package = tmp_path / "outer_pkg" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    write(package, "VALUE = 7\n", "values.py")
    path = write(package, "from .values import VALUE\ndef train(job): return VALUE\n", "a.py")
    function = load_target(Target(path, "train"))
    assert function(None) == 7
    assert function.__module__ == "outer_pkg.inner.a"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from os.path import *", "no function 'train'"),
        ("train = 5", "type int"),
        ("train = lambda: 1", "takes no job"),
    ],
)
def test_what_the_worker_finds(tmp_path, text, said):
    path = write(tmp_path, text)
    check_target(str(path))
    with pytest.raises(TargetError, match=said):
        load_target(Target(path, "train"))


def test_what_the_file_raises_passes_through(tmp_path):
    path = write(tmp_path, "def train(job): ...\nraise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        load_target(Target(path, "train"))
    assert "job_file" not in sys.modules
