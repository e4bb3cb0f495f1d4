"""Numbers in JSON: what Python's reader lets in and no float can be, and what no document may hold.

Pure; imports nothing of calib.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["finite", "is_number"]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value that was read is a finite number, and neither a bool nor a whole number too large for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def finite(value: Any) -> Any:
    """A value to be written: None for a number that is not finite, lists for tuples, texts for keys; also within."""
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
