"""The one question to ask of a path before it is opened: opening a pipe waits for ever for somebody to write to it."""

from pathlib import Path

from models.errors import CheckpointError


def check_regular(path: Path) -> None:
    """Refuses what is there but is neither file nor folder (opening a folder fails by itself, with its reason).

    Raises:
        CheckpointError: a pipe, a socket or a device.
        OSError: it can't be looked at.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(f"{path}: is a pipe, a socket or a device, expected a file")
