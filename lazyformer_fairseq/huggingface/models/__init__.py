"""The transformers models that wrap this package's networks."""

# This import must come first. If the registration is waiting for transformers, it happens here, while none of this
# package's modules is partially imported.
from transformers import PreTrainedModel as _PreTrainedModel  # noqa: F401
