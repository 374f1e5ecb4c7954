"""Which failures of a store pass, and how long to wait for that. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Cause = Literal["busy", "missing", "denied", "unusable", "unknown"]
"""Why a request failed: `busy` and `unknown` may pass, the others do not."""

_BUSY = re.compile(
    r"SLOW_?DOWN|THROTTL|TOO_?MANY|UNAVAILABLE|REQUEST_TIMEOUT|NETWORK_CONNECTION|curlCode"
    r"|timed? ?out|(?:status|code):? (?:408|429|5\d\d)\b",
    re.IGNORECASE,
)
_MISSING = re.compile(
    r"NO_SUCH_(?:KEY|BUCKET)|RESOURCE_NOT_FOUND|(?:status|code):? 404\b", re.IGNORECASE
)
_DENIED = re.compile(
    r"ACCESS_?DENIED|FORBIDDEN|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|UNRECOGNIZED_CLIENT"
    r"|INVALID_(?:CLIENT_)?TOKEN|EXPIRED_?TOKEN|CREDENTIAL|AUTHENTICATION|UNAUTHENTICATED"
    r"|(?:status|code):? 40[13]\b",
    re.IGNORECASE,
)
_UNUSABLE = (IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError, ValueError)


def cause_of(error: Exception) -> Cause:
    """Return why a request failed, by the exception's type, else by its text."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, PermissionError):
        return "denied"
    if isinstance(error, ConnectionError | TimeoutError):
        return "busy"
    text = str(error)
    if _DENIED.search(text):
        return "denied"
    if _MISSING.search(text):
        return "missing"
    if _BUSY.search(text):
        return "busy"
    return "unusable" if isinstance(error, _UNUSABLE) else "unknown"


@dataclass(frozen=True)
class RetryPolicy:
    """How long one read may fail before it is given up."""

    deadline_s: float = 120.0
    """For all attempts together."""
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0

    def delay_s(self, num_failures: int, chance: float) -> float:
        """Return the wait after so many failures in a row (from 1 up).

        Twice as long each time, and anything down to half of it: `chance` is uniform in 0 to 1,
        so that clients which failed together do not return together.
        """
        longest = min(self.first_delay_s * 2 ** min(num_failures - 1, 30), self.max_delay_s)
        return longest * (0.5 + 0.5 * chance)
