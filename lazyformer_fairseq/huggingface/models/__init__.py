"""Models of transformers with this package's networks inside."""

# First of all: where registration waits for transformers, it registers now, while no module is half loaded.
from transformers import PreTrainedModel as _PreTrainedModel  # noqa: F401
