"""Models of transformers with this package's networks inside."""

# First of all, as in ``exported``: where registration waits for transformers, it registers now.
from transformers import PreTrainedModel as _PreTrainedModel  # noqa: F401
