"""What MLflow calls to load one of our models. Runs where the model is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import farandole

if TYPE_CHECKING:
    import pandas as pd


class PyfuncModel:
    """A saved model as MLflow wants it: a table in, a table out."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def predict(self, data: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return one row of outputs per row of `data`. MLflow's `params` have no meaning here."""
        import pandas as pd

        outputs = self._model.predict(data)
        return pd.DataFrame(
            {name: list(a) if a.ndim > 1 else a for name, a in outputs.items()}, index=data.index
        )


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    """Load a saved model; one that is a pickle only with ``{"allow_pickle": True}``."""
    allow_pickle = bool((model_config or {}).get("allow_pickle", False))
    return PyfuncModel(farandole.load_model(data_path, allow_pickle=allow_pickle))
