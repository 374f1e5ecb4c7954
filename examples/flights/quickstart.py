"""From raw tables to a trained, tracked and tested model; `make quickstart` runs this.
Run `python quickstart.py [FOLDER]`; the data go there, the runs into `runs`.

Prepares the flights, trains on two workers, shows the scores and a few predictions, then trains
the same job with one worker and with three and compares the weights bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
from prepare import prepare
from rich.console import Console
from rich.table import Table

import farandole as fa

HERE = Path(__file__).parent
TRAIN = HERE / "train.py"
NUM_PREDICTIONS = 6

console = Console(highlight=False)


def fit(workers: int, data: Path, **settings: object) -> fa.Result:
    """Run the training job on so many workers."""
    console.rule(f"train on {workers} worker{'s' if workers > 1 else ''}", align="left")
    return fa.run(TRAIN, workers=workers, params={"data": str(data)}, **settings)


def show_scores(result: fa.Result) -> None:
    """Print the scores on the held-out months beside that of the base rate."""
    scores = result.value
    table = Table("held out: November and December", "log-loss", "ROC AUC")
    table.add_row("the model", f"{scores['holdout_log_loss']:.4f}", f"{scores['holdout_auc']:.4f}")
    table.add_row("predicting the base rate", f"{scores['base_rate_log_loss']:.4f}", "0.5000")
    console.print(table)


def show_predictions(model_folder: Path, data: Path) -> None:
    """Load the saved model and predict a few flights of December from their raw columns."""
    month = pq.read_table(data / "month=12" / "part-0.parquet", partitioning=None)
    spread = [month.num_rows * place // NUM_PREDICTIONS for place in range(NUM_PREDICTIONS)]
    flights = month.take(spread)
    chances = fa.load_model(model_folder).predict(flights)["late"]
    table = Table("flight", "from", "to", "leaves", "delay at departure", "chance", "late")
    for flight, chance in zip(flights.to_pylist(), chances, strict=True):
        table.add_row(
            f"{flight['carrier']} {flight['flight']}",
            flight["origin"],
            flight["dest"],
            f"{flight['sched_dep']:%d %b %H:%M}",
            f"{flight['dep_delay']:+.0f} min",
            f"{chance:.0%}",
            "late" if flight["late"] else "in time",
        )
    console.print(table)


def weights_digest(result: fa.Result) -> str:
    """Return the SHA-256 of the saved weights."""
    return hashlib.sha256((result.model / "weights.pt").read_bytes()).hexdigest()


def compare_weights(results: dict[int, fa.Result]) -> bool:
    """Print the digests of all runs' weights; return whether they are the same."""
    digests = {workers: weights_digest(result) for workers, result in results.items()}
    table = Table("workers", "SHA-256 of the weights")
    for workers, digest in sorted(digests.items()):
        table.add_row(str(workers), digest)
    console.print(table)
    return len(set(digests.values())) == 1


def relative(path: Path) -> str:
    """Return a path as seen from here, for the commands to copy."""
    return os.path.relpath(path)


def main(folder: Path) -> None:
    """Run the whole of it, with the data in a folder, and fail if the weights differ."""
    started = time.monotonic()
    data = prepare(folder)
    num_rows = sum(pq.read_metadata(file).num_rows for file in data.rglob("*.parquet"))
    console.print(f"{num_rows:,} flights in {relative(data)}")

    results = {2: fit(2, data, tracker={"name": "mlflow"})}
    show_scores(results[2])
    show_predictions(results[2].model, data)
    for workers in (1, 3):
        results[workers] = fit(workers, data)
    same = compare_weights(results)
    if not same:
        sys.exit("the weights differ: this is a bug, please report it")

    run = results[2].run_dir
    console.print("The same weights, bit for bit, on 1, 2 and 3 workers.")
    console.print(f"All of it took {time.monotonic() - started:.0f} s.\n")
    console.print(
        f"""\
report    {relative(run / "report" / "report.png")}
run       {relative(run)}
model     {relative(results[2].model)}
MLflow    .venv/bin/mlflow ui --backend-store-uri sqlite:///{relative(run.parent / "mlflow.db")}

try next
  .venv/bin/farandole runs
  .venv/bin/farandole run {relative(TRAIN)} --workers 2 -p data={relative(data)} -p epochs=5
  docs/guide/from-a-loop.md shows how to turn a loop of your own into a job""",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data" / "flights")
