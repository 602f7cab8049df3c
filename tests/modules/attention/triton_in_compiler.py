"""Compiles the Triton kernels, with all their tiles, for GPUs that need not be there; reads what they take up.

``test_triton.py`` runs this. On its own: ``pytest -s`` prints a line for each kernel.
"""

import functools
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from lazyformer_fairseq.modules.attention import triton_kernels, triton_passes
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants import triton_rope

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
A100, H100 = 80, 90
SHARED_MEMORY = {A100: 163 * 1024, H100: 227 * 1024}
# Of a thread's 1020 bytes of registers; kernels of large heads and many layers come to some.
MOST_SPILLED = 256
# The modules and names of kernels with a single choice of tiles.
WITHOUT_TILES = (
    (triton_passes, "write_rows"),
    (triton_passes, "row_sums_kernel"),
    (triton_rope, "rotation_kernel"),
)


class Compiled(NamedTuple):
    """A kernel for one choice of tiles: registers of a thread, bytes it keeps in memory instead, shared memory."""

    name: str
    tiles: tuple[int, ...]
    registers: int
    spilled: int
    shared: int


class Launched:
    """A kernel that does this, whatever its grid."""

    def __init__(self, does: Callable[..., None]):
        self.does = does

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.does


def absent_gpu(capability: int) -> SimpleNamespace:
    """As much of a driver as the compiler asks for."""
    target = GPUTarget("cuda", capability, 32)
    now = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    return SimpleNamespace(get_current_target=lambda: target, **now)


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[Compiled]:
    """Launches compile instead, for all tiles they may choose from, and add to this list."""
    found: list[Compiled] = []

    def compile_all(kernel, tiles, set_to_zero):
        def launch(**arguments: Any) -> None:
            for choice in tiles:
                binary = kernel.warmup(**arguments, **choice.config.all_kwargs(), grid=(1,))
                registers, stack = _resources(binary.asm["cubin"], tmp_path)
                found.append(Compiled(kernel.__name__, tuple(choice), registers, stack, binary.metadata.shared))
                print(found[-1])

        return Launched(launch)

    monkeypatch.setattr(triton_kernels, "_tuned", compile_all)
    for module, name in WITHOUT_TILES:
        compile_it = functools.partial(getattr(module, name).warmup, grid=(1,))
        monkeypatch.setattr(module, name, Launched(compile_it))
    return found


def _resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """(registers, bytes of the stack) of a thread."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(cubin)
    said = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return int(registers), int(stack)


def launch_all(size: int, layers: int, dtype: torch.dtype, is_biased: bool = True) -> None:
    """Every kernel, with bias and padding or neither, in a model's layout: q, k, v of the ``s`` are one projection."""
    batch, heads, time, buckets = 2, 12, 512, 32
    q, k, v = (
        part.unflatten(-1, (heads, size)).transpose(1, 2)
        for part in torch.zeros(batch, time, 3 * heads * size, dtype=dtype).chunk(3, -1)
    )
    of_layers = [torch.zeros(batch, time, heads, size, dtype=dtype).transpose(1, 2) for _ in range(layers)]
    sums = torch.zeros(batch, heads, time)
    table, by_distance = torch.zeros(buckets, heads), torch.zeros(2 * time - 1, dtype=torch.int64)
    scores = Scores(table, by_distance, 128, torch.full((batch,), time)) if is_biased else Scores()
    kernels = triton_kernels.InTriton()
    if layers == 1:
        kernels.attend_forward(q, k, v, scores)
        kernels.reuse_forward(q, k, v, sums, scores)
        kernels.value_gradient(q, k, v, sums, scores)
        triton_kernels.row_sums(q, v)
        angles = torch.zeros(time, size).expand_as(q)
        triton_rope.rotate(q, angles, angles)
    kernels.block_gradient(q, k, [v, *of_layers[1:]], of_layers, sums, sums, scores)


@pytest.fixture(params=[A100, H100])
def capability(request, monkeypatch) -> int:
    """Of an absent GPU; kernels know nothing of what they compiled for others."""
    triton.runtime.driver.set_active(absent_gpu(request.param))
    for kernel in [*vars(triton_passes).values(), triton_rope.rotation_kernel]:
        if isinstance(kernel, triton.JITFunction):
            kernel.device_caches.clear()
    return request.param


@pytest.mark.parametrize(
    ("size", "layers", "dtype"),
    [*itertools.product([64, 128], [1, 2, 6], [torch.bfloat16]), (64, 2, torch.float16), (64, 2, torch.float32)],
)
def test_fits(compiled, capability: int, size: int, layers: int, dtype: torch.dtype):
    launch_all(size, layers, dtype)
    first_of_each = {kernel.name: kernel for kernel in reversed(compiled)}
    for kernel in first_of_each.values():
        assert kernel.shared <= SHARED_MEMORY[capability], kernel
        assert kernel.spilled <= MOST_SPILLED or dtype == torch.float32, kernel


def test_without_a_bias(compiled, capability: int):
    launch_all(64, 1, torch.bfloat16, is_biased=False)
    assert {kernel.name for kernel in compiled} == {"forward_kernel", "value_gradient_kernel", "key_side_kernel"}


def test_descriptors_save_registers(compiled, capability: int):
    """Where there is no bias, on a Hopper; a loop with descriptors adds to dQ without instructions of its threads."""
    launch_all(64, 2, torch.bfloat16, is_biased=False)
    registers = {kernel.tiles: kernel.registers for kernel in compiled}
    described = [tiles for tiles in registers if tiles[-1]]
    if capability < H100:
        assert not described
        return
    small = 64, 64, 8, 2
    assert registers[*small, True] < 0.9 * registers[*small, False]
    assert max(kernel.spilled for kernel in compiled if kernel.tiles in described) <= MOST_SPILLED


class FirstStageReachedError(Exception):
    """Raised where Triton's front end has read a kernel and the stages for a GPU would begin."""


def test_the_front_end_reads_every_kernel(monkeypatch):
    """It takes less than Python does, as in code behind an early return. Quick, as nothing is compiled for a GPU."""
    read = []

    def stop(source, metadata):
        raise FirstStageReachedError

    def only_read(kernel, tiles=None, set_to_zero=()):
        def launch(*positional, **named):
            # The last tiles have descriptors, the first have none.
            choices = [{}] if tiles is None else [tiles[place].config.all_kwargs() for place in (0, -1)]
            for choice in choices:
                with pytest.raises(FirstStageReachedError):
                    kernel.warmup(*positional, grid=(1,), **named, **choice)
                read.append((kernel.__name__, choice.get("DESCRIPTORS", False)))

        return Launched(launch)

    monkeypatch.setattr(CUDABackend, "add_stages", lambda self, stages, *_: stages.update(ttir=stop))
    monkeypatch.setattr(triton_kernels, "_tuned", only_read)
    for module, name in WITHOUT_TILES:
        monkeypatch.setattr(module, name, only_read(getattr(module, name)))
    triton.runtime.driver.set_active(absent_gpu(H100))
    for is_biased in (True, False):
        launch_all(64, 1, torch.bfloat16, is_biased)
        launch_all(64, 2, torch.bfloat16, is_biased)
    tiled = {"forward_kernel", "value_gradient_kernel", "key_side_kernel"}
    assert set(read) == {*itertools.product(tiled, (False, True)), *((name, False) for _, name in WITHOUT_TILES)}
