"""Maps transformers' names for activations to ours, and ours to theirs."""

# Our names, by transformers' names. If several of transformers' names are equivalent, an export writes the first one.
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
WRITTEN_ACTIVATIONS = {our_name: written for written, our_name in reversed(ACTIVATIONS.items())}
