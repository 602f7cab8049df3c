"""The model of transformers that an export takes its code from."""

# First of all: where registration waits for transformers, it registers now, while no part is half loaded.
from transformers import PreTrainedModel as _PreTrainedModel  # noqa: F401
