"""The one error of the host side."""


class SchedulerOutputError(ValueError):
    """A SchedulerOutput that contradicts the batch. Raised before anything changed: the batch is what it was."""
