"""``--compile``: functions of a training step through torch.compile.

Functions, not modules: a module that torch.compile wraps has other names in its checkpoints, and one that it compiles
in place loses that when it is copied. Shapes may change: what torch first takes for constant it makes variable when it
sees another value.
"""

import functools
from collections.abc import Callable

import torch

from lazyformer_fairseq.errors import UserError


class CannotCompileError(UserError, RuntimeError):
    """torch has no working compiler here.

    A RuntimeError too: at any other error in an update fairseq first writes a whole checkpoint, crash.pt.
    """


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function`, compiled when it is first called; the same object whenever it is asked for.

    Raises:
        CannotCompileError: when called, where there is no working compiler.
    """
    from torch._dynamo.exc import TorchDynamoException

    fast = torch.compile(function)

    @functools.wraps(function)
    def call(*args):
        try:
            return fast(*args)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise CannotCompileError(
                f"--compile: torch cannot compile here ({reason}); install a C++ compiler such as g++ (for a GPU, "
                "triton too), or leave the option out"
            ) from error

    return call
