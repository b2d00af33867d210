"""The errors of the model layer. All are ValueErrors, so one except clause serves who doesn't care which."""


class CheckpointError(ValueError):
    """A checkpoint (folder or file) is broken, hostile, incomplete or of a kind that isn't supported."""


class TokenizerError(ValueError):
    """A tokenizer can't be built from what the checkpoint holds, or was asked for a token it lacks."""


class TemplateError(ValueError):
    """A chat template is absent, doesn't parse, refused the conversation, or tried to leave its sandbox."""


class ModelNotFoundError(ValueError):
    """A model name fits nothing that is on this machine or that can be reached."""


class FetchError(ValueError):
    """A registered model could not be downloaded, or what arrived isn't the pinned file."""
