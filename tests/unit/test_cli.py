from __future__ import annotations

from pathlib import Path

import pytest
import typer

from farandole import cli
from farandole.config import JobConfig
from farandole.errors import JobStoppedError, WorkerFailedError
from farandole.job import doctor, launch
from farandole.job.rundir import RunDir, RunState, append_line


@pytest.fixture
def launched(monkeypatch, tmp_path) -> list[JobConfig]:
    """Work in an empty folder; catch the configurations that would be launched."""
    configs: list[JobConfig] = []

    def fake(config: JobConfig, function=None, *, display=None, on_error=None) -> launch.Result:
        configs.append(config)
        return launch.Result(tmp_path / "job", metrics={"loss": 0.5})

    monkeypatch.setattr(launch, "launch", fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FARANDOLE_RUNS", raising=False)
    return configs


def make_run(folder: Path, name: str = "2026-one", **config) -> RunDir:
    made = JobConfig(target="train.py", run_dir=folder / "runs" / name, **config)
    run = RunDir.create(made)
    run.write_config(made)
    run.write_state(RunState("finished", ended=1e9, started=1e9, workers=2, exit_code=0))
    record = {"kind": "step", "step": 40, "epoch": 1, "values": {"loss": 0.25}}
    append_line(run.metrics_file, record)
    return run


def options() -> dict[str, list[tuple[str, str | None]]]:
    """Return the flags of every command, with their help."""
    group = typer.main.get_command(cli.app)
    commands = {"": group, **group.commands}  # type: ignore[attr-defined]
    inner = commands.pop("data").commands
    commands |= {f"data {name}": command for name, command in inner.items()}
    return {
        name: [(flag, getattr(param, "help", None)) for param in command.params
               for flag in [*param.opts, *param.secondary_opts]]
        for name, command in commands.items()
    }  # fmt: skip


def test_command_line_options():
    # A ratchet: whoever changes the flags changes this, README.md and CHANGES.md with them.
    found = {name: sorted(flag for flag, _ in flags) for name, flags in options().items()}
    assert found == {
        "": ["--debug", "--version"],
        "run": [
            "--config", "--engine", "--no-require-exact", "--precision", "--quiet", "--reduction",
            "--require-exact", "--resume", "--run-dir", "--runs", "--seed", "--slots", "--threads",
            "--tracker", "--transport", "--workers", "-c", "-o", "-p", "-q", "-w", "target",
        ],
        "runs": ["--runs"],
        "status": ["--runs", "run"],
        "logs": ["--follow", "--lines", "--rank", "--runs", "-f", "-n", "run"],
        "stop": ["--now", "--runs", "--timeout", "run"],
        "sync": ["--runs", "--tracker", "--uri", "run"],
        "doctor": ["--runs"],
        "data inspect": [
            "--batch-size", "--columns", "--filter", "--json", "--label", "paths",
        ],
        "data verify": ["--columns", "--quiet", "--threads", "-q", "paths"],
        "data rewrite": [
            "--columns", "--compression", "--filter", "--memory", "--no-shuffle", "--overwrite",
            "--partition-by", "--quiet", "--row-group-bytes", "--row-group-rows", "--seed",
            "--shuffle", "-q", "out", "source",
        ],
    }  # fmt: skip


def test_every_option_has_help():
    for name, flags in options().items():
        for flag, text in flags:
            assert text, f"{name} {flag}"


def test_flags_become_configuration(launched):
    arguments = [
        "run", "train.py:fit", "--workers", "2", "--slots", "4", "--seed", "7", "--threads", "2",
        "--engine", "local", "--reduction", "fast", "--precision", "bf16", "--transport",
        "network", "--tracker", "mlflow", "--run-dir", "here", "--runs", "there", "-p", "lr=1e-3",
        "-p", "name=a=b", "-o", "params.n=5", "-o", "checkpoint.every_steps=10", "--quiet",
    ]  # fmt: skip
    assert cli.main(arguments) == 0
    (config,) = launched
    assert config.target == "train.py:fit"
    assert (config.workers, config.slots, config.seed, config.threads) == (2, 4, 7, 2)
    assert (config.reduction, config.precision, config.transport) == ("fast", "bf16", "network")
    assert (config.engine, config.tracker.name) == ("local", "mlflow")
    assert (config.run_dir, config.runs) == (Path("here"), Path("there"))
    assert config.params == {"lr": 1e-3, "name": "a=b", "n": 5}
    assert config.checkpoint.every_steps == 10


def test_flags_win_over_the_file(launched):
    Path("job.toml").write_text('target = "a.py"\nslots = 4\nseed = 3\n')
    assert cli.main(["run", "--config", "job.toml", "--slots", "2"]) == 0
    assert (launched[0].target, launched[0].slots, launched[0].seed) == ("a.py", 2, 3)


def test_the_one_variable(launched, monkeypatch):
    monkeypatch.setenv("FARANDOLE_RUNS", "elsewhere")
    monkeypatch.setenv("FARANDOLE_SLOTS", "2")
    assert cli.main(["run", "a.py"]) == 0
    assert (launched[0].runs, launched[0].slots) == (Path("elsewhere"), 8)


def test_resume_starts_from_the_jobs_configuration(launched, tmp_path, capsys):
    run = make_run(tmp_path, slots=4, workers=2, params={"lr": 0.1})
    arguments = ["run", "--resume", "--run-dir", str(run.path)]
    assert cli.main([*arguments, "--workers", "3"]) == 0
    config = launched[0]
    assert (config.target, config.slots, config.workers) == ("train.py", 4, 3)
    assert (config.params, config.resume, config.run_dir) == ({"lr": 0.1}, True, run.path)
    assert cli.main([*arguments, "--slots", "8"]) == 2
    assert "slots = 8: a resumed job must keep 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "target"),
        (["run", "a.py", "--sots", "1"], "No such option"),
        (["run", "a.py", "--workers", "x"], "--workers"),
        (["run", "a.py", "--workers", "9"], "at most `slots` workers"),
        (["run", "a.py", "-o", "x"], "must be written NAME=VALUE"),
        (["run", "a.py", "-o", "slot=1"], "did you mean 'slots'"),
        (["run", "a.py", "--config", "no.toml"], "cannot be read"),
        (["run", "a.py", "--resume"], "resume"),
        (["run", "--resume", "--run-dir", "none"], "holds no job"),
        (["status", "none"], "no job in runs"),
        (["status"], "holds no jobs"),
        (["logs", "none"], "no job in runs"),
        (["logs"], "Missing argument"),
        (["stop", "none"], "no job in runs"),
        (["sync", "none"], "no job in runs"),
        (["nonsense"], "No such command"),
        (["data", "inspect", "none"], "does not exist"),
        (["data", "inspect", "none", "--filter", "month"], "COLUMN OP VALUE"),
        (["data", "rewrite", "none", "out"], "does not exist"),
        (["data", "rewrite", "none", "."], "exists already"),
        (["data", "rewrite", "none", "out", "--memory", "1 foot"], "is no size"),
    ],
)
def test_bad_input_is_one_line_and_two(launched, capsys, arguments, said):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("farandole: error: ")
    assert said in err
    assert len(err.splitlines()) == 1
    assert launched == []


FAILURE = WorkerFailedError(
    worker_id=1, rank=1, host="h", reason="KeyError: 'x'", log_path="log", traceback="Trace\nback\n"
)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            FAILURE,
            1,
            "Trace\nback\n\nfarandole: error: rank 1 on h failed: KeyError: 'x'\nlog: log\n",
        ),
        (JobStoppedError(step=3, reason="Ctrl-C"), 130, "farandole: stopped after step 3"),
        (JobStoppedError(step=3, reason="SIGTERM"), 143, "farandole: stopped after step 3"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_job_ended_is_the_exit_code(launched, monkeypatch, capsys, error, code, said):
    def fail(config, *, display, on_error):
        raise error

    monkeypatch.setattr(launch, "launch", fail)
    assert cli.main(["run", "a.py"]) == code
    assert said in capsys.readouterr().err


def test_an_error_is_shown_at_once_and_only_once(launched, monkeypatch, capsys):
    said: list[str] = []

    def fail(config, *, display, on_error):
        on_error(FAILURE)
        said.append(capsys.readouterr().err)  # a tracker may take its time after this
        raise FAILURE

    monkeypatch.setattr(launch, "launch", fail)
    assert cli.main(["run", "a.py"]) == 1
    assert "farandole: error: rank 1 on h failed: KeyError: 'x'" in said[0]
    assert capsys.readouterr().err == ""
    with pytest.raises(WorkerFailedError):
        cli.main(["--debug", "run", "a.py"])


def test_debug_and_bugs_show_the_traceback(launched, monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda config, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "a.py"])
    from farandole.errors import ConfigError

    with pytest.raises(ConfigError):
        cli.main(["--debug", "run"])


def test_runs_and_status(launched, tmp_path, capsys):
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().out == "no jobs in runs\n"
    run = make_run(tmp_path)
    run.event("plan", total_steps=80, batch_size=1)
    assert cli.main(["runs"]) == 0
    out = capsys.readouterr().out
    for part in ("2026-one", "finished", "40/80", "0.25", str(run.path)):
        assert part in out
    for arguments in (["status"], ["status", "2026"], ["status", str(run.path)]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        for part in ("2026-one", "finished", "40/80, epoch 2", "0.25"):
            assert part in out


def test_logs(launched, tmp_path, capsys):
    run = make_run(tmp_path)
    run.worker_log(0).write_text("a\nb\n")
    run.worker_log(1).write_text("c\n")
    assert cli.main(["logs", "2026", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "0 | b\n1 | c\n"
    assert cli.main(["logs", "2026", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "a\nb\n"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_doctors_exit_code(launched, monkeypatch, capsys, status, code):
    monkeypatch.setattr(doctor, "diagnose", lambda runs: [doctor.Check("a", status, "see [b]")])
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.split() == [status, "a", "see", "[b]"]


def test_the_doctor_names_an_old_store(launched, monkeypatch):
    monkeypatch.setattr(doctor, "_torch", lambda: doctor.Check("torch", "ok", ""))
    monkeypatch.setattr(doctor, "known_names", lambda kind: ())
    Path("mlruns/0").mkdir(parents=True)
    found = {check.name: check for check in doctor.diagnose(Path("runs"))}
    assert "mlflow.db" in found["mlruns/"].detail
    assert found["engines"].status == "fail"


def test_version_and_help(launched, capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "farandole 0.1.0\n"
    assert cli.main(["run", "--help"]) == 0
    assert "FARANDOLE_RUNS" in capsys.readouterr().out
    assert cli.main([]) == 2
