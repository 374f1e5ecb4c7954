"""Saved models: a folder that predicts from raw columns, without the code that trained it.

=====================  ====================================================================
``model.pt2``          the model as a `torch.export` program
``model.pkl``          in its place, a pickle, if the model cannot be exported
``weights.pt``         its ``state_dict``
``preprocessor.json``  what turns raw columns into its inputs, if there is one
``signature.json``     names and types of inputs and outputs
``input_example.json`` two rows that can be predicted
=====================  ====================================================================
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from farandole.data.preprocess import Preprocessor
from farandole.errors import DataError, UsageError

PROGRAM = "model.pt2"
PICKLE = "model.pkl"
_CHUNK_ROWS = 65536
# A program exported for a variable number of rows takes two or more of them.
_MIN_ROWS = 2

_log = logging.getLogger(__name__)


def save_model(
    folder: Path,
    model: torch.nn.Module,
    example: tuple[Tensor, ...],
    preprocessor: Preprocessor | None = None,
) -> None:
    """Write a model's folder, as a whole or not at all; an older one is replaced.

    Parameters
    ----------
    folder : Path
    model : torch.nn.Module
        In evaluation mode. Returns a tensor, a tuple or a dict of tensors with a value per row.
    example : tuple of Tensor
        The arguments of one call, with at least two rows.
    preprocessor : Preprocessor, optional
        Makes the arguments from raw columns: its features, its categories, or both.

    Raises
    ------
    UsageError
        The example does not fit the model or the preprocessor.
    """
    _check_example(example, preprocessor)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    outputs = _named_outputs(model(*(tensor.to(device) for tensor in example)))
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_program(temporary, model, example)
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        torch.save(state, temporary / "weights.pt")
        if preprocessor is not None:
            (temporary / "preprocessor.json").write_text(preprocessor.to_json())
        inputs, rows = _describe_inputs(example, preprocessor)
        signature = {
            "inputs": inputs,
            "outputs": [{"name": n, "dtype": str(a.dtype)} for n, a in outputs.items()],
            "shapes": [[list(t.shape[1:]), str(t.dtype).removeprefix("torch.")] for t in example],
        }
        (temporary / "signature.json").write_text(json.dumps(signature, indent=2))
        (temporary / "input_example.json").write_text(json.dumps(rows, indent=2))
        _replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_example(example: tuple[Tensor, ...], preprocessor: Preprocessor | None) -> None:
    rows = {len(tensor) for tensor in example if isinstance(tensor, Tensor) and tensor.ndim}
    if len(rows) != 1 or min(rows) < _MIN_ROWS:
        raise UsageError(
            problem="the example of job.save is no batch of two or more rows",
            remedy="pass a batch of the loader, or the tensors that the model is called with",
        )
    kinds = _argument_kinds(preprocessor) if preprocessor is not None else ()
    if preprocessor is not None and len(example) != len(kinds):
        raise UsageError(
            problem=f"the model takes {len(example)} tensors, the preprocessor makes {len(kinds)}",
            remedy="let the model take the features, the categories, or both, in this order",
        )


def _argument_kinds(preprocessor: Preprocessor) -> tuple[str, ...]:
    kinds = {"features": preprocessor.numeric, "categories": preprocessor.cardinalities}
    return tuple(kind for kind, columns in kinds.items() if columns)


def _write_program(folder: Path, model: torch.nn.Module, example: tuple[Tensor, ...]) -> None:
    rows = torch.export.Dim("rows", min=_MIN_ROWS)
    shapes = tuple({0: rows} for _ in example)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    model.to("cpu")
    try:
        arguments = tuple(tensor.detach().cpu() for tensor in example)
        try:
            program = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False)
            torch.export.save(program, folder / PROGRAM)
        except Exception as error:
            (folder / PROGRAM).unlink(missing_ok=True)
            reason = str(error).partition("\n")[0]
            _log.warning("the model is saved as a pickle: torch.export refused it (%s)", reason)
            (folder / PICKLE).write_bytes(cloudpickle.dumps(model))
    finally:
        model.to(device)


def _describe_inputs(
    example: tuple[Tensor, ...], preprocessor: Preprocessor | None
) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """Return the inputs' names and types, and two example rows."""
    if preprocessor is None:
        names = _column_names(example)
        rows = [dict(zip(names, _flat_row(example, row), strict=True)) for row in range(_MIN_ROWS)]
        kinds = [str(t.dtype).removeprefix("torch.") for t in example for _ in range(_width(t))]
        return [{"name": n, "dtype": k} for n, k in zip(names, kinds, strict=True)], rows
    inputs = [{"name": name, "dtype": "float64"} for name in preprocessor.numeric]
    row: dict[str, Any] = dict(zip(preprocessor.numeric, preprocessor.means, strict=True))
    for name, vocabulary in zip(preprocessor.categorical, preprocessor.vocabularies, strict=True):
        value = vocabulary[0] if vocabulary else ""
        kind = {bool: "bool", int: "int64"}.get(type(value), "string")
        inputs.append({"name": name, "dtype": kind})
        row[name] = value
    for name, boundaries in zip(preprocessor.bucketed, preprocessor.boundaries, strict=True):
        if name not in row:
            inputs.append({"name": name, "dtype": "float64"})
            row[name] = boundaries[0] if boundaries else 0.0
    return inputs, [row, row]


def _width(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape[1:], dtype=int))


def _column_names(example: tuple[Tensor, ...]) -> list[str]:
    return [
        f"input{place if len(example) > 1 else ''}_{column}"
        for place, tensor in enumerate(example)
        for column in range(_width(tensor))
    ]


def _flat_row(example: tuple[Tensor, ...], row: int) -> list[Any]:
    return [value for tensor in example for value in tensor[row].reshape(-1).tolist()]


def _named_outputs(result: Any) -> dict[str, np.ndarray]:
    """Return a model's outputs by name, as arrays."""
    if isinstance(result, Tensor):
        result = {"output": result}
    elif isinstance(result, tuple | list):
        result = {f"output_{place}": value for place, value in enumerate(result)}
    if not isinstance(result, Mapping) or not all(isinstance(v, Tensor) for v in result.values()):
        raise UsageError(
            problem=f"the model returned a {type(result).__name__}",
            remedy="let it return a tensor, or a tuple or dict of tensors",
        )
    return {
        str(name): (v.float() if v.dtype is torch.bfloat16 else v).detach().cpu().numpy()
        for name, v in result.items()
    }


def _replace(source: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


class Model:
    """A saved model. Made by `load_model`."""

    def __init__(
        self, module: Any, preprocessor: Preprocessor | None, signature: Mapping[str, Any]
    ) -> None:
        self._module = module
        self._preprocessor = preprocessor
        self.signature = signature

    @property
    def inputs(self) -> list[str]:
        """Names of the columns that `predict` needs."""
        return [column["name"] for column in self.signature["inputs"]]

    def predict(self, data: Any) -> dict[str, np.ndarray]:
        """Predict rows.

        Parameters
        ----------
        data : pandas.DataFrame, pyarrow.Table, or dict of str to array
            The raw columns named by `inputs`. A model without a preprocessor also takes its
            tensors' values as arrays: one of shape (n, F), or a tuple of them.

        Returns
        -------
        dict of str to ndarray, shape (n, ...)
            The outputs; a model that returns one tensor has ``output``.

        Raises
        ------
        ColumnError
            A column is missing or of a wrong type.
        """
        arguments = self._arguments(data)
        num_rows = len(arguments[0])
        if num_rows == 0:
            raise DataError(path="the input", problem="there are no rows", remedy="pass some")
        parts = [
            self._call([a[start : start + _CHUNK_ROWS] for a in arguments])
            for start in range(0, num_rows, _CHUNK_ROWS)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _call(self, arguments: Sequence[Tensor]) -> dict[str, np.ndarray]:
        num_rows = len(arguments[0])
        if num_rows < _MIN_ROWS:
            arguments = [torch.cat([argument] * _MIN_ROWS) for argument in arguments]
        with torch.no_grad():
            outputs = _named_outputs(self._module(*arguments))
        return {name: array[:num_rows] for name, array in outputs.items()}

    def _arguments(self, data: Any) -> list[Tensor]:
        if self._preprocessor is not None:
            features, categories = self._preprocessor.apply(data)
            made = {"features": features, "categories": categories}
            return [torch.from_numpy(made[kind]) for kind in _argument_kinds(self._preprocessor)]
        if isinstance(data, tuple | list):
            return [torch.as_tensor(value) for value in data]
        if isinstance(data, np.ndarray | Tensor):
            return [torch.as_tensor(data)]
        shapes = self.signature["shapes"]
        columns = iter(self.inputs)
        arguments: list[Tensor] = []
        for shape, dtype in shapes:
            taken = [np.asarray(data[next(columns)]) for _ in range(int(np.prod(shape, dtype=int)))]
            values = torch.from_numpy(np.stack(taken, axis=1))
            arguments.append(values.to(getattr(torch, dtype)).reshape(len(values), *shape))
        return arguments


def load_model(folder: str | Path, *, allow_pickle: bool = False) -> Model:
    """Load a model that `Job.save` wrote: ``result.model``, or ``model/`` of a run directory.

    Parameters
    ----------
    folder : path
    allow_pickle : bool, default=False
        Load a model that could only be saved as a pickle. A pickle runs code: allow it for
        models whose origin you trust.

    Raises
    ------
    DataError
        The folder holds no model, or one that is a pickle.
    """
    folder = Path(folder)
    try:
        signature = json.loads((folder / "signature.json").read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            path=str(folder),
            problem=f"holds no saved model ({error})",
            remedy="give the folder that job.save wrote: model/ of a run directory",
        ) from error
    file = folder / "preprocessor.json"
    preprocessor = Preprocessor.from_json(file.read_text()) if file.exists() else None
    if (folder / PROGRAM).exists():
        module: Any = torch.export.load(folder / PROGRAM).module()
    elif allow_pickle:
        module = cloudpickle.loads((folder / PICKLE).read_bytes())
    else:
        raise DataError(
            path=str(folder),
            problem="is a pickle, which runs code when it is loaded",
            remedy="if you trust its origin, load it with allow_pickle=True",
        )
    return Model(module, preprocessor, signature)
