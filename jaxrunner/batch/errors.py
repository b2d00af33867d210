"""The one error of the host side."""

from typing import NoReturn


class SchedulerOutputError(ValueError):
    """A SchedulerOutput that contradicts the batch. Raised before anything changed: the batch is what it was."""


def refuse(message: str) -> NoReturn:
    """Raises it."""
    raise SchedulerOutputError(message)
