"""Models for transformers that contain the networks of this package."""

# This import must come first. If the registration waits for transformers, it happens here, before any module of this
# package is only partly imported.
from transformers import PreTrainedModel as _PreTrainedModel  # noqa: F401
