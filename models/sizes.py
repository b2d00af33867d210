"""How large a model's numbers may be, checked before they size anything."""

from typing import Any

# Far above any model there is, far below what would overflow or fill a machine.
LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31 - 1,
}


def check_size(value: Any, limit: int, name: str) -> int:
    """``value``, if it is a whole number from 1 to ``limit``.

    Raises:
        ValueError: it isn't; the message calls it ``name``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ValueError(f"{name} is {value!r}, expected a whole number from 1 to {limit}")
    return value


def check_number(value: Any, name: str) -> float:
    """``value``, if it is a finite number above 0.

    Raises:
        ValueError: it isn't; the message calls it ``name``.
    """
    # Compared, not converted: JSON can hold an integer that no float can.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
        raise ValueError(f"{name} is {value!r}, expected a finite number above 0")
    return float(value)
