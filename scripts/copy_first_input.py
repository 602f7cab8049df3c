"""The copy-first-input benchmark (Vecoven et al., 2020, section 4.1), which tests whether cells can remember T steps.

After a series of T numbers drawn from N(0, 1), a model must output the first one. A model without memory has a mean
squared error of 1. As in the published code, models have two layers of width 100 and are trained by Adam at 1e-3. The
published code uses 45,000 series; here every series is new.

    python scripts/copy_first_input.py --length 300 --updates 2000
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.modules.sublayers.recurrent import Recurrent

CAUSAL = Context(Scores(is_causal=True), lambda *_: "eager")


class Layer(nn.Module):
    """A recurrent cell without its output projection. Its outputs are the states (B, T, C)."""

    def __init__(self, cell: str, inputs: int, width: int):
        super().__init__()
        self.cell = Recurrent(width, cell, is_causal=True)
        self.cell.in_proj = nn.Linear(inputs, self.cell.in_proj.out_features)
        nn.init.zeros_(self.cell.in_proj.bias)
        for part in self.cell.in_proj.weight.data.split(width):
            nn.init.xavier_uniform_(part)
        self.cell.out_proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, {}, CAUSAL)[0]


class Model(nn.Module):
    def __init__(self, cell: str, width: int):
        super().__init__()
        layers = (Layer(cell, inputs, width) for inputs in (1, width))
        self.layers = nn.GRU(1, width, 2, batch_first=True) if cell == "gru" else nn.Sequential(*layers)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layers(x)
        return self.out((states[0] if isinstance(states, tuple) else states)[:, -1])[:, 0]


def error(model: Model, batch: int, length: int) -> Tensor:
    x = torch.randn(batch, length, 1)
    return F.mse_loss(model(x), x[:, 0, 0])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("length", 300), ("updates", 2000), ("width", 100), ("batch", 100), ("seed", 1)):
    parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
parser.add_argument("--cells", nargs="+", default=["gru", "brc", "nbrc", "mingru"])
parser.add_argument("--lr", type=float, default=1e-3, help="default: 0.001")
given = parser.parse_args()
print("| cell | parameters | mean squared error after each quarter of the updates | seconds |\n|---|---|---|---|")
for cell in given.cells:
    torch.manual_seed(given.seed)
    model, start, found = Model(cell, given.width), time.perf_counter(), []
    optimizer = torch.optim.Adam(model.parameters(), given.lr)
    for update in range(1, given.updates + 1):
        optimizer.zero_grad()
        error(model, given.batch, given.length).backward()
        optimizer.step()
        if update % max(1, given.updates // 4) == 0:
            with torch.no_grad():
                found.append(sum(error(model, 500, given.length).item() for _ in range(10)) / 10)
    parameters, seconds = sum(weight.numel() for weight in model.parameters()), time.perf_counter() - start
    print(f"| {cell} | {parameters:,} | {', '.join(f'{each:.4f}' for each in found)} | {seconds:.0f} |", flush=True)
