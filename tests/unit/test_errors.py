from __future__ import annotations

import dataclasses
import pickle

import pytest

from farandole import errors
from farandole.errors import ConfigProblem, FarandoleError, UserError

VALUES = {
    "str": "some text",
    "int": 3,
    "bool": False,
    "int | None": None,
    "str | None": None,
    "tuple[str, ...]": ("one", "two"),
    "tuple[ConfigProblem, ...]": (ConfigProblem(key="slots", value=0, expected="must be 1"),),
}


def all_errors(cls: type[FarandoleError] = FarandoleError) -> list[type[FarandoleError]]:
    below = [error for child in cls.__subclasses__() for error in all_errors(child)]
    return [child for child in [cls, *below] if child.__module__ == errors.__name__]


def example(cls: type[FarandoleError]) -> FarandoleError:
    return cls(**{field.name: VALUES[str(field.type)] for field in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_survives_pickling_with_its_fields(cls):
    error = example(cls)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.fields() == error.fields()
    assert str(again) == str(error)
    assert again.exit_code == error.exit_code


@pytest.mark.parametrize("cls", [cls for cls in all_errors() if dataclasses.fields(cls)])
def test_every_message_has_its_fields(cls):
    error = example(cls)
    assert str(error)
    assert cls.__name__ in repr(error)
    text = [field.name for field in dataclasses.fields(cls) if field.type == "str"]
    for name in text:
        marked = type(error)(**{**error.fields(), name: f"<{name}>"})
        assert f"<{name}>" in str(marked)


def test_exit_codes():
    codes = {cls: example(cls).exit_code for cls in all_errors()}
    for cls, code in codes.items():
        if cls is errors.JobStoppedError:
            continue
        assert code == (2 if issubclass(cls, UserError) else 1)
    assert errors.JobStoppedError(step=1, reason="Ctrl-C").exit_code == 130
    assert errors.JobStoppedError(step=1, reason="SIGTERM").exit_code == 143


def test_the_nearest_name_is_offered():
    error = errors.UnknownNameError(kind="engine", name="locl", known=("local", "ray"))
    assert "did you mean 'local'?" in str(error)
    assert errors.nearest("zzz", ["local"]) is None


def test_input_that_only_a_worker_could_judge_has_the_exit_code_of_bad_input():
    error = example(errors.WorkerFailedError)
    assert type(error)(**{**error.fields(), "user_error": True}).exit_code == 2
