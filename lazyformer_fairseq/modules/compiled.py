"""Compilation of functions with torch.compile, for ``--compile``.

We compile functions rather than modules, because wrapping a module in torch.compile changes the names in its
checkpoints, and a module compiled in place loses its compilation when it is copied. Shapes may change: torch first
assumes that a size is constant, and makes it dynamic when it sees another value.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lazyformer_fairseq.errors import UserError

GRAPHS = 256  # per function, over all networks and shapes of a process; torch's default of 8 is too low for a search


@functools.cache
def compiled(function: Callable, whole: bool = False, asked_by: str = "--compile") -> Callable:
    """Return a version of `function` that is compiled on its first call; results are cached by arguments.

    Calling the result raises a UserError if torch cannot compile the function, for example because no compiler is
    installed.

    Args:
        function: the function to compile.
        whole: whether to raise an error for parts that torch cannot compile, instead of running them uncompiled.
        asked_by: the option to name in error messages.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # the name before torch 2.7
    setattr(config, limit, max(getattr(config, limit), GRAPHS))  # beyond this limit torch runs the code uncompiled
    fast = torch.compile(function, fullgraph=whole)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return fast(*args)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{asked_by}: torch cannot compile this here ({reason}); omit the option or, if a compiler is missing, "
                "install a C++ compiler such as g++ (for a GPU, triton too)"
            ) from error

    return call
