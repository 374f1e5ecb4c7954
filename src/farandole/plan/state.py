"""Where an epoch stands: all that is needed to go on from there, in under 200 bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from farandole.errors import PlanStateError

if TYPE_CHECKING:
    from farandole.plan.steps import Steps

_DIGEST_CHARS = 32


@dataclass(frozen=True)
class PlanState:
    """How much of an epoch is consumed, and of which data in which order.

    Neither the batch size nor the number of workers is part of it: either may change where an
    epoch is taken up again. Rows that were read ahead and not handed out are not consumed.

    Attributes
    ----------
    fingerprint : str
        The first 128 bits of the data set's fingerprint, in hex.
    order : str
        `Steps.order_digest`: tells whether the same rows come after the same number of rows.
    seed, epoch : int
        Of the plan.
    rows : int
        Rows of the epoch consumed: the plan's `start_row` to go on with.
    """

    fingerprint: str
    order: str
    seed: int
    epoch: int
    rows: int

    @classmethod
    def after(cls, plan: Steps, num_steps: int, fingerprint: str) -> PlanState:
        """Return the state after the first `num_steps` steps of a plan are consumed."""
        rows = plan.rows_before(num_steps)
        return cls(fingerprint[:_DIGEST_CHARS], plan.order_digest, plan.seed, plan.epoch, rows)

    def check(self, plan: Steps, fingerprint: str) -> None:
        """Raise unless an epoch of a data set can be taken up from this state.

        Parameters
        ----------
        plan : Steps
            Of the epoch's whole; its `start_row` is not looked at.
        fingerprint : str
            Of the data set.

        Raises
        ------
        PlanStateError
            Naming all that differs.
        """
        found = PlanState.after(plan, 0, fingerprint)
        names = {"fingerprint": "data (fingerprint)", "order": "order (slots, shuffle, windows)"}
        differences = tuple(
            f"{names.get(name, name)}: {saved} in the state, {now} here"
            for name in ("fingerprint", "order", "seed", "epoch")
            if (saved := getattr(self, name)) != (now := getattr(found, name))
        )
        if not differences and not 0 <= self.rows <= plan.num_rows:
            differences = (f"rows: {self.rows} in the state, {plan.num_rows} in the epoch here",)
        if differences:
            raise PlanStateError(
                differences=differences,
                remedy="put back what the state was made with, or begin anew without the state",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanState:
        """Return the state that `to_dict` gave.

        Raises
        ------
        PlanStateError
            If it is none.
        """
        kinds = {"fingerprint": str, "order": str, "seed": int, "epoch": int, "rows": int}
        names = [field.name for field in fields(cls)]
        if set(values) != set(names):
            problem = f"fields: {sorted(values)} in the state, {sorted(names)} expected"
        else:
            wrong = [name for name in names if type(values[name]) is not kinds[name]]
            if not wrong:
                return cls(**values)
            problem = f"{wrong[0]}: {values[wrong[0]]!r} in the state"
        raise PlanStateError(
            differences=(problem,), remedy="pass a state that this version of Farandole has made"
        )

    def to_bytes(self) -> bytes:
        """Return the state as compact JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanState:
        """Return the state that `to_bytes` gave; raises PlanStateError if it is none."""
        try:
            values: Any = json.loads(data)
        except ValueError:
            values = None
        return cls.from_dict(cast("dict[str, Any]", values) if isinstance(values, dict) else {})


def digest_of(*parts: object) -> str:
    """Return 8 hex digits that tell apart what decides an order."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()
