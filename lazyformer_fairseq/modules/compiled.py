"""``--compile``: functions of a training step through torch.compile.

Functions, not modules: wrapping a module in torch.compile changes the names in its checkpoints, and a module compiled
in place loses that when copied. Shapes may change: torch first takes a size for constant, and makes it variable when it
sees another value.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lazyformer_fairseq.errors import UserError

GRAPHS = 256  # of a function, for all networks and shapes of a process; torch's 8 are too few for a bench or a search


@functools.cache
def compiled(function: Callable, whole: bool = False, asked_by: str = "--compile") -> Callable:
    """Return `function`, compiled at its first call; always the same object.

    Args:
        function: what is compiled.
        whole: what torch cannot compile as one piece is an error; else it runs as it is.
        asked_by: the option that an error names.

    Raises:
        UserError: when called, where there is no working compiler.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # its name before torch 2.7
    setattr(config, limit, max(getattr(config, limit), GRAPHS))  # beyond it torch compiles no more, and trains on
    fast = torch.compile(function, fullgraph=whole)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return fast(*args)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{asked_by}: torch cannot compile this here ({reason}); leave the option out or, if a compiler is "
                "missing, install a C++ compiler such as g++ (for a GPU, triton too)"
            ) from error

    return call
