"""transformers' names of the activations."""

# Ours by theirs; where several of theirs mean the same, the first one is written.
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
