from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from farandole.config import (
    NUMERICS,
    JobConfig,
    config_to_toml,
    load_config,
    parse_value,
    read_config_file,
)
from farandole.errors import ConfigError


def problems_of(overrides, file=None, base=None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, base)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_defaults_are_valid_and_frozen():
    config = load_config(None, {"target": "train.py"})
    assert (config.slots, config.threads, config.reduction) == (8, 1, "exact")
    with pytest.raises(ValueError, match="frozen"):
        config.slots = 4  # type: ignore[misc]


def test_all_problems_come_at_once_each_with_key_value_and_what_is_right():
    found = problems_of(
        {
            "workers": 9,
            "seed": -1,
            "slot": 3,
            "tracker.urii": "x",
            "reduction": "exat",
            "checkpoint.keep": 0,
        }
    )
    assert set(found) == {
        "target", "workers", "seed", "slot", "tracker.urii", "reduction", "checkpoint.keep"
    }  # fmt: skip
    assert "-1" in found["seed"]
    assert "greater than or equal to 0" in found["seed"]
    assert "did you mean 'slots'?" in found["slot"]
    assert "did you mean 'tracker.uri'?" in found["tracker.urii"]
    assert "'exact' or 'fast'" in found["reduction"]
    assert "at most `slots` workers" in found["workers"]


def test_a_section_option_without_its_section_is_found():
    assert (
        "'checkpoint.every_steps'" in problems_of({"target": "a", "every_steps": 3})["every_steps"]
    )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"workers": 3, "slots": 2}, "workers"),
        ({"resume": True}, "resume"),
        ({"checkpoint.best": "loss", "checkpoint.every_s": "none"}, "checkpoint.best"),
        ({"tracker.uri": "http://localhost"}, "tracker.uri"),
    ],
)
def test_options_that_disagree(overrides, key):
    assert set(problems_of({"target": "a.py", **overrides})) == {key}
    nested: dict[str, object] = {"target": "a.py"}
    for name, value in overrides.items():
        section, _, inner = name.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value  # type: ignore[index]
        else:
            nested[name] = value
    with pytest.raises(ConfigError):
        JobConfig(**nested)  # type: ignore[arg-type]


def test_no_second_problem_follows_from_a_first_one():
    assert set(problems_of({"target": "a.py", "workers": 9, "slots": 0})) == {"slots"}


def test_credentials_are_not_in_the_message():
    found = problems_of({"target": "a.py", "tracker.uri": "http://user:secret@host/"})
    assert "secret" not in found["tracker.uri"]


@pytest.mark.parametrize("value", [True, "2", 2.5, [1]])
def test_types_are_strict(value):
    assert set(problems_of({"target": "a.py", "workers": value})) == {"workers"}


@pytest.mark.parametrize(("overrides", "key"), [
    ({"checkpoint": 5}, "checkpoint"),
    ({"workers": 2, "workers.x": 1}, "workers.x"),
])  # fmt: skip
def test_sections_and_values_are_not_mixed_up(overrides, key):
    assert key in problems_of({"target": "a.py", **overrides})


@pytest.mark.parametrize("value", [{1, 2}, date(2013, 1, 1), Path("x"), [object()], {1: 2}])
def test_parameters_must_survive_json(value):
    assert "`x` must be" in problems_of({"target": "a.py", "params": {"x": value}})["params"]


def test_file_then_overrides(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(
        'target = "a.py"\nslots = 4\n[params]\nlr = 0.1\nn = 1\n[checkpoint]\nkeep = 3\n'
    )
    config = load_config(file, {"slots": 2, "params.lr": 0.5})
    assert (config.slots, config.params, config.checkpoint.keep) == (2, {"lr": 0.5, "n": 1}, 3)


def test_yaml_says_the_same_as_toml(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("target: a.py\ncheckpoint:\n  every_s: null\n  every_steps: 5\n")
    config = load_config(file, {})
    assert (config.checkpoint.every_s, config.checkpoint.every_steps) == (None, 5)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "slots = = 2", "line 1"),
        ("a.yaml", "a: [", "line"),
        ("a.yaml", "- 1", "table"),
        ("a.ini", "", ".toml"),
        ("a.toml", None, "No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, said):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert said in problems_of({}, file=file)["file"]


def test_problems_of_a_file_name_it(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("sloots = 2")
    with pytest.raises(ConfigError, match=r"job\.toml"):
        load_config(file, {"target": "a.py"})


def test_toml_round_trip(tmp_path):
    config = load_config(
        None,
        {
            "target": "a.py:train",
            "params": {"lr": 1e-3, "layers": [1, 2], "name": "none", "deep": {"a": True}},
            "run_dir": Path("some/where"),
            "checkpoint.every_s": None,
            "checkpoint.best": "loss",
            "checkpoint.every_steps": 3,
            "tracker.name": "mlflow",
        },
    )
    file = tmp_path / "job.toml"
    file.write_text(config_to_toml(config))
    assert load_config(file, {}) == config
    assert read_config_file(file)["checkpoint.every_s"] == "none"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-3", 1e-3), (".5", 0.5), ("true", True), ("True", True), ("[1, 2]", [1, 2]),
        ("abc", "abc"), ('"none"', "none"), ("none", "none"), ("2013-01-01", "2013-01-01"),
        ("1\nb = 2", "1\nb = 2"), ("", ""), ("(1, 2)", "(1, 2)"), ("s3://a/b", "s3://a/b"),
        ("007", "007"),
    ],
)  # fmt: skip
def test_values_of_flags(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


CHANGED = {"slots": 4, "seed": 1, "threads": 2, "reduction": "fast", "precision": "bf16"}


def test_a_resumed_job_keeps_what_decides_its_bits():
    base = load_config(None, {"target": "a.py", "workers": 2, "params.lr": 0.1})
    assert set(CHANGED) == set(NUMERICS)
    assert set(problems_of(CHANGED, base=base)) == set(NUMERICS)
    config = load_config(None, {"workers": 3, "tracker.name": "mlflow"}, base)
    assert (config.workers, config.tracker.name, config.params) == (3, "mlflow", {"lr": 0.1})


def test_what_is_marked_numerics_is_what_is_checked():
    marked = {
        name
        for name, field in JobConfig.model_fields.items()
        if "(numerics)" in (field.description or "")
    }
    assert marked == set(NUMERICS)
