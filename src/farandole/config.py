"""What a job is configured by: typed, frozen, validated as a whole.

Nothing here reads the environment; flags and variables enter in `farandole.cli` only.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import tomli_w
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from farandole.errors import ConfigError, ConfigProblem, nearest, without_credentials

DEFAULT_SLOTS = 8
NUMERICS = ("slots", "seed", "threads", "reduction", "precision")
"""The attributes that decide the bits of a result; a resumed job cannot change them."""

_SUFFIXES = (".toml", ".yaml", ".yml")
# To judge one of these, the other must be right: it is left out when the other is wrong.
_JUDGED_BY = {"slots": "workers", "run_dir": "resume"}


class _Section(BaseModel):
    """A table of options, in which the text ``none`` stands for no value."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants"
    )

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        items = cast("Mapping[str, Any]", data).items()
        return {key: None if value == "none" else value for key, value in items}


class CheckpointConfig(_Section):
    """When the state of a job is written, and which checkpoints are kept."""

    every_steps: int | None = Field(default=None, ge=1, description="write every N committed steps")
    every_s: float | None = Field(default=60.0, gt=0, description="write every N seconds")
    keep: int = Field(default=2, ge=1, description="how many of the newest to keep")
    best: str | None = Field(
        default=None, description="also keep the best by this evaluation's `name/metric`"
    )
    mode: Literal["min", "max"] = Field(
        default="min", description="whether a smaller or larger is best"
    )


class TrackerConfig(_Section):
    """Where a job is recorded beside its run directory."""

    name: str | None = Field(default=None, description="tracker: mlflow, or another by entry point")
    uri: str | None = Field(
        default=None, description="tracking server; default: sqlite beside the runs"
    )
    experiment: str = Field(default="farandole", min_length=1, description="experiment's name")
    flush_s: float = Field(
        default=30.0, ge=0, description="wait so long for the tracker at the job's end"
    )


class JobConfig(_Section):
    """All that decides a job, as resolved from defaults, file and flags.

    Attributes marked *numerics* decide the bits of the result; no other attribute does.
    """

    target: str = Field(min_length=1, description="training function: FILE.py or FILE.py:function")
    params: dict[str, Any] = Field(default_factory=dict, description="its keyword arguments")
    workers: int | None = Field(default=None, ge=1, description="default: the cores over `threads`")
    slots: int = Field(
        default=DEFAULT_SLOTS, ge=1, le=4096, description="shares of a batch (numerics)"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="of order and random numbers (numerics)"
    )
    threads: int = Field(default=1, ge=1, description="intra-op threads per worker (numerics)")
    reduction: Literal["exact", "fast"] = Field(
        default="exact", description="how gradients are added (numerics)"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of `job.autocast` (numerics)"
    )
    require_exact: bool = Field(
        default=False, description="refuse workers and checkpoints whose bits may differ"
    )
    transport: Literal["auto", "shared_memory", "network"] = Field(
        default="auto", description="what carries gradients; auto: shared memory on one host"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="of the network path"
    )
    engine: str = Field(default="local", description="what starts the workers")
    runs: Path = Field(
        default=Path("runs"), strict=False, description="folder of the run directories"
    )
    run_dir: Path | None = Field(
        default=None, strict=False, description="this job's; default: a new one under `runs`"
    )
    resume: bool = Field(default=False, description="go on from the newest checkpoint of `run_dir`")
    bucket_bytes: int = Field(
        default=4 << 20, ge=1024, description="gradients exchanged as one message"
    )
    collective_timeout_s: float = Field(
        default=600.0, gt=0, description="a peer silent so long is lost"
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="all workers must join within it"
    )
    stop_grace_s: float = Field(
        default=20.0, ge=0, description="time to finish a step and a checkpoint"
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = Field(default_factory=TrackerConfig)

    @field_validator("params")
    @classmethod
    def _plain(cls, params: dict[str, Any]) -> dict[str, Any]:
        for name, value in params.items():
            if not _is_plain(value):
                raise PydanticCustomError(
                    "params",
                    "`{name}` must be a string, number, boolean, list or table, not {kind}",
                    {"name": name, "kind": type(value).__name__},
                )
        return params

    @model_validator(mode="after")
    def _agree(self) -> JobConfig:
        problems = tuple(_disagreements(self))
        if problems:
            raise ConfigError(problems=problems)
        return self


def load_config(
    file: Path | None, overrides: Mapping[str, Any], base: JobConfig | None = None
) -> JobConfig:
    """Return the configuration of a file, with some keys overridden.

    Parameters
    ----------
    file : Path, optional
        A TOML or YAML file.
    overrides : mapping
        Values by key; a key inside a section is dotted, as ``checkpoint.every_steps``.
    base : JobConfig, optional
        The configuration of a job that is resumed: what neither `file` nor `overrides` give
        comes from it, and they must not change what decides the bits of the result.

    Raises
    ------
    ConfigError
        With every problem of the file and the overrides.
    """
    data: dict[str, Any] = {} if base is None else base.model_dump()
    given = {} if file is None else read_config_file(file)
    problems: list[ConfigProblem] = []
    for key, value in [*given.items(), *overrides.items()]:
        if not _assign(data, key, value):
            section = key.split(".")[0]
            expected = f"{section!r} has a value of its own, so it can hold no keys"
            problems.append(ConfigProblem(key=key, value=value, expected=expected))
    config, found = _validate(data)
    problems += found
    if config is not None and base is not None:
        problems += _changed_numerics(config, base)
    if problems or config is None:
        raise ConfigError(problems=tuple(problems), source=None if file is None else str(file))
    return config


def read_config_file(file: Path) -> dict[str, Any]:
    """Return what a TOML or YAML file gives, by dotted key. Raises `ConfigError`."""

    def wrong(expected: str) -> ConfigError:
        return ConfigError(
            problems=(ConfigProblem(key="file", value=str(file), expected=expected),)
        )

    if file.suffix not in _SUFFIXES:
        raise wrong(f"the name must end in one of {', '.join(_SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
        data: Any = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise wrong(f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise wrong(f"must be {file.suffix[1:].upper()}: {reason}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise wrong("must hold a table of options")
    return dict(_flatten({str(key): value for key, value in cast("dict[Any, Any]", data).items()}))


def parse_value(text: str) -> Any:
    """Return the value that a flag's text stands for.

    That is a TOML value, else a Python literal (``.5``, ``True``), else the text itself. Dates
    stay text.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    return value if _is_plain(value) else text


def config_to_toml(config: JobConfig) -> str:
    """Return the configuration as a TOML file that `load_config` reads back.

    TOML has no null: options without a value are left out, or written as ``none`` where that is
    not the default; parameters of the function that are None are left out.
    """
    return tomli_w.dumps(_for_toml(config))


# --- details ------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    """Return whether JSON can hold a value and give it back unchanged."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return all(isinstance(key, str) and _is_plain(item) for key, item in items)
    return value is None or type(value) in (str, int, float, bool)


def _disagreements(config: JobConfig) -> Iterator[ConfigProblem]:
    """Yield what is wrong between options that are right by themselves."""
    if config.workers is not None and config.workers > config.slots:
        expected = (
            f"at most `slots` workers can be used, which is {config.slots}; "
            "give fewer workers, or more slots (that changes the result)"
        )
        yield ConfigProblem(key="workers", value=config.workers, expected=expected)
    if config.resume and config.run_dir is None:
        expected = "needs `run_dir`, the folder of the job to go on with"
        yield ConfigProblem(key="resume", value=True, expected=expected)
    checkpoint = config.checkpoint
    if checkpoint.best and checkpoint.every_steps is None and checkpoint.every_s is None:
        expected = "no checkpoint is ever written; give checkpoint.every_steps or .every_s"
        yield ConfigProblem(key="checkpoint.best", value=checkpoint.best, expected=expected)
    uri = config.tracker.uri
    if uri is not None and config.tracker.name is None:
        expected = "no tracker is chosen; give tracker.name (--tracker)"
        yield ConfigProblem(key="tracker.uri", value=without_credentials(uri), expected=expected)


def _changed_numerics(config: JobConfig, base: JobConfig) -> Iterator[ConfigProblem]:
    for key in NUMERICS:
        value, before = getattr(config, key), getattr(base, key)
        if value != before:
            expected = f"a resumed job must keep {before!r}, since this decides its result"
            yield ConfigProblem(key=key, value=value, expected=expected)


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables by dotted key; parameters' own tables stay whole."""
    for key, value in data.items():
        is_section = key in _sections() or (not prefix and key == "params")
        if is_section and isinstance(value, dict):
            yield from _flatten(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _assign(data: dict[str, Any], key: str, value: Any) -> bool:
    """Set a dotted key, making tables on the way; return whether that was possible."""
    *parents, last = key.split(".")
    for parent in parents:
        inner = data.setdefault(parent, {})
        if not isinstance(inner, dict):
            return False
        data = cast("dict[str, Any]", inner)
    data[last] = value
    return True


def _validate(data: dict[str, Any]) -> tuple[JobConfig | None, list[ConfigProblem]]:
    try:
        return JobConfig.model_validate(data), []
    except ConfigError as error:
        return None, list(error.problems)
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = [_problem(detail) for detail in details]
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]}
    wrong |= {_JUDGED_BY[key] for key in wrong & set(_JUDGED_BY)}
    rest = {key: value for key, value in data.items() if key not in wrong}
    try:
        JobConfig.model_validate({"target": "any.py", **rest})
    except ConfigError as error:
        problems += error.problems
    return None, problems


def _problem(detail: ErrorDetails) -> ConfigProblem:
    key = ".".join(str(part) for part in detail["loc"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        guess = nearest(key, _known_keys())
        return ConfigProblem(
            key=key, value=detail["input"], expected="there is no such option", nearest=guess
        )
    if kind == "missing":
        expected = "is required: the training function, FILE.py or FILE.py:function"
        return ConfigProblem(key=key, value=None, expected=expected)
    if kind == "model_type":
        expected = f"is a section; give keys of it, as {key}.{next(iter(_sections()[key]))}"
        return ConfigProblem(key=key, value=detail["input"], expected=expected)
    expected = detail["msg"].replace("Input should be", "must be")
    return ConfigProblem(key=key, value=detail["input"], expected=expected)


def _sections() -> dict[str, tuple[str, ...]]:
    """Return the options of every section."""
    return {
        "checkpoint": tuple(CheckpointConfig.model_fields),
        "tracker": tuple(TrackerConfig.model_fields),
    }


def _known_keys() -> list[str]:
    """Return every key, those inside sections dotted."""
    keys = list(JobConfig.model_fields)
    for section, names in _sections().items():
        keys += [f"{section}.{name}" for name in names]
    return keys


def _for_toml(section: BaseModel) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            table[name] = _for_toml(value)
        elif isinstance(value, Path):
            table[name] = str(value)
        elif isinstance(value, dict):
            table[name] = _without_none(cast("dict[str, Any]", value))
        elif value is not None:
            table[name] = value
        elif field.default is not None:
            table[name] = "none"
    return table


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _without_none(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in cast("list[Any]", value) if item is not None]
    return value
