"""The names of activations in transformers."""

# Our names by those of transformers. If several names of theirs mean the same, an export writes the first one.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
WRITTEN_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
