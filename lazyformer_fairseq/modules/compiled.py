"""Compilation of functions with torch.compile, for ``--compile``.

We compile functions rather than modules, because wrapping a module in torch.compile changes its weights' names in
checkpoints, and a module compiled in place loses its compilation when it is copied. Shapes may vary: torch first
assumes that each size is constant, and treats a size as dynamic once its value changes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lazyformer_fairseq.errors import UserError

# Maximum number of compiled graphs per function, counting all networks and shapes in a process. torch's default of 8 is
# too low for a search.
GRAPHS = 256


@functools.cache
def compiled(function: Callable, whole: bool = False, asked_by: str = "--compile") -> Callable:
    """Return a version of `function` that is compiled when it is first called.

    Calls with equal arguments return the same version. Calling that version raises a UserError if torch cannot compile
    the function, such as when no compiler is installed.

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
                f"{asked_by}: torch cannot compile the code on this machine ({reason}); omit the option or, if a "
                "compiler is missing, install a C++ compiler such as g++ (and triton, if there is a GPU)"
            ) from error

    return call
