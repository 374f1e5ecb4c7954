"""Models that are saved by a job and predict without the code that trained them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import farandole as fa
from farandole.errors import ColumnError, DataError, UsageError
from farandole.job.model import PICKLE, PROGRAM, load_model, save_model

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

from inline_job import data, run_inline, sgd, value_of  # noqa: E402


class Two(nn.Module):
    """Takes features and categories, and returns two things."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(2 + 3, 1)

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> dict[str, torch.Tensor]:
        joined = torch.cat([features, self.embedding(categories[:, 0])], 1)
        score = self.linear(joined).squeeze(1).sigmoid()
        return {"score": score, "late": score > 0.5}


class Branching(nn.Module):
    """What torch.export refuses: its way depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features) if features.sum().item() > 0 else features[:, :1]


def simple() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)
    ).eval()


def expected(model: nn.Module, features: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(features)).numpy()


def rows(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("run") / "model"
    model = simple()
    save_model(folder, model, (torch.from_numpy(rows(3)),))
    return folder, model


@pytest.mark.parametrize("num_rows", [1, 2, 5, 70_000])
def test_any_number_of_rows(num_rows: int, saved: tuple[Path, nn.Module]) -> None:
    folder, model = saved
    features = rows(num_rows, seed=3)
    (output,) = load_model(folder).predict(features).values()
    assert output.shape == (num_rows, 2)
    np.testing.assert_allclose(output, expected(model, features), rtol=1e-4, atol=1e-6)


def test_no_rows_are_refused(saved: tuple[Path, nn.Module]) -> None:
    with pytest.raises(DataError, match="there are no rows"):
        load_model(saved[0]).predict(rows(0))


def test_columns_of_every_kind(saved: tuple[Path, nn.Module]) -> None:
    folder, model = saved
    loaded = load_model(folder)
    assert loaded.inputs == ["input_0", "input_1", "input_2", "input_3"]
    features = rows(5)
    columns = {name: features[:, i] for i, name in enumerate(loaded.inputs)}
    for given in (columns, pd.DataFrame(columns), pa.table(columns), torch.from_numpy(features)):
        output = loaded.predict(given)["output"]
        np.testing.assert_allclose(output, expected(model, features), rtol=1e-5, atol=1e-6)


def test_the_example_can_be_predicted(saved: tuple[Path, nn.Module]) -> None:
    folder, model = saved
    example = pd.DataFrame(json.loads((folder / "input_example.json").read_text()))
    output = load_model(folder).predict(example)["output"]
    np.testing.assert_allclose(output, expected(model, rows(3)[:2]), rtol=1e-5, atol=1e-6)


def preprocessor() -> Any:
    table = fa.ArrayDataset(
        number=np.array([1.0, 2.0, 3.0, 4.0]),
        other=np.array([0.0, 0.0, 1.0, 1.0]),
        kind=np.array(["a", "b", "a", "c"], object),
    )
    return fa.Preprocessor.fit(table, numeric=["number", "other"], categorical=["kind"])


def test_raw_columns_with_a_preprocessor(tmp_path: Path) -> None:
    made = preprocessor()
    model = Two().eval()
    raw = {"number": [1.5, 9.0, 2.0], "other": [1.0, 0.0, 0.5], "kind": ["a", "unseen", None]}
    features, categories = made.apply(pa.table(raw))
    example = (torch.from_numpy(features), torch.from_numpy(categories))
    save_model(tmp_path / "model", model, example, made)
    loaded = load_model(tmp_path / "model")
    assert loaded.inputs == ["number", "other", "kind"]
    with torch.no_grad():
        whole = model(*example)
    for num_rows in (1, 3):
        table = pa.table({name: values[:num_rows] for name, values in raw.items()})
        output = loaded.predict(table)
        assert set(output) == {"score", "late"}
        np.testing.assert_allclose(output["score"], whole["score"][:num_rows], rtol=1e-5)
        assert output["late"].dtype == np.bool_
    with pytest.raises(ColumnError, match="kind"):
        loaded.predict(pa.table({"number": [1.0], "other": [0.0]}))
    shown = pd.DataFrame(json.loads((tmp_path / "model" / "input_example.json").read_text()))
    assert loaded.predict(shown)["score"].shape == (2,)


def test_a_pickle_is_loaded_only_if_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Branching().eval()
    save_model(tmp_path / "model", model, (torch.ones(2, 4),))
    assert "the model is saved as a pickle: torch.export refused it" in caplog.text
    assert (tmp_path / "model" / PICKLE).exists()
    assert not (tmp_path / "model" / PROGRAM).exists()
    with pytest.raises(DataError, match=r"is a pickle, which runs code .* allow_pickle=True"):
        load_model(tmp_path / "model")
    features = np.abs(rows(3))
    output = load_model(tmp_path / "model", allow_pickle=True).predict(features)["output"]
    np.testing.assert_allclose(output, expected(model, features), rtol=1e-6)


def test_saving_again_replaces_the_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, Branching().eval(), (torch.ones(2, 4),))
    model = simple()
    save_model(folder, model, (torch.from_numpy(rows(3)),))
    assert not (folder / PICKLE).exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert torch.equal(weights["0.weight"], model.state_dict()["0.weight"])


def test_a_failed_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save_model(folder, simple(), (torch.from_numpy(rows(3)),))

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save_model(folder, simple(), (torch.from_numpy(rows(3)),))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert load_model(folder).predict(rows(2))["output"].shape == (2, 2)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ((torch.ones(1, 4),), "two or more rows"),
        ((), "two or more rows"),
        ((torch.ones(2, 4), torch.ones(3, 4)), "two or more rows"),
        (("text",), "two or more rows"),
    ],
)
def test_examples_that_are_none(example: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        save_model(tmp_path / "model", simple(), example)
    assert list(tmp_path.iterdir()) == []


def test_an_example_that_does_not_fit_the_preprocessor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model takes 1 tensors, the preprocessor makes 2"):
        save_model(tmp_path / "model", simple(), (torch.ones(2, 4),), preprocessor())


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_model(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "signature.json").write_text(content)
    with pytest.raises(DataError, match=r"holds no saved model .* job\.save wrote"):
        load_model(tmp_path)


def test_a_job_saves_what_it_trained(tmp_path: Path) -> None:
    def train(job: fa.Job) -> tuple[np.ndarray, bool]:
        model, optimizer = job.prepare(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)), sgd)
        batch: Any = None
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=16):
                job.backward(model(batch.features).square().mean())
                optimizer.step()
        job.save(nn.Sequential(model, nn.Sigmoid()), batch)
        training = model.training
        return expected(model.eval(), rows(5)), training

    logits, training = value_of(run_inline(train, tmp_path))
    assert training
    output = load_model(tmp_path / "job" / "model").predict(rows(5))["output"]
    np.testing.assert_allclose(output, 1 / (1 + np.exp(-logits)), rtol=1e-5)
