"""JSON as RFC 8259 has it. Python's json module also accepts NaN, Infinity, and numbers that become infinite."""

import json
import math
from typing import Any, NoReturn


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text, as `json.loads` does.

    Raises:
        ValueError: the text is not JSON, or has a number that is not finite as a float, such as NaN or 1e999.
        RecursionError: the text is nested too deeply.
    """
    return json.loads(text, parse_constant=_reject, parse_float=_finite)


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number
