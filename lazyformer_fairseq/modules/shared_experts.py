"""Expert parallelism for ``f[experts=8]``: experts are distributed over processes (GShard, 2020, section 3.1).

Each process stores and computes some of the experts. All other weights are replicated, and each process has its own
batches. All-to-all communication sends tokens to their experts and back. Since an expert receives the tokens of all
processes, its gradient is already summed over processes. This gradient is divided by the number of processes, so it
equals the average that DDP or a similar wrapper computes for the other weights.

Checkpoints are the same as those of a single process: weights and moments are gathered when a checkpoint is saved, and
each process selects its own experts when one is loaded.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, Optional

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.feed_forward import Experts

logger = logging.getLogger(__name__)

MASTERS = "fp32_weights"  # key of the single-precision weights in an optimizer's state
Groups = Sequence[Mapping[str, Any]]  # an optimizer's parameter groups


def distribute_experts(model: nn.Module, group: Any = None) -> Optional["SharedExperts"]:
    """Distribute a model's experts over processes, so that each process keeps only some of them.

    All processes must call this with the same weights, before the model is wrapped in DDP and its weights are passed to
    the optimizer. DDP then ignores the experts. The expert weights that this process keeps get the attribute
    ``expert``, which fairseq reads.

    Args:
        model: the model, which is modified in place.
        group: the process group; by default all processes.

    Returns:
        An object that describes the distribution, or None if all processes keep all experts. This is the case if there
        is only one process, if the model has no experts, or if the number of experts is not divisible by the number of
        processes.
    """
    size = distributed.get_world_size(group)
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    odd = next((each.count for each in experts if each.count % size), None)
    if size == 1 or not experts:
        return None
    if odd is not None:
        logger.info("experts: %d processes cannot share %d experts evenly, so each keeps all of them", size, odd)
        return None
    return SharedExperts(model, group)


class SharedExperts:
    """The distribution of a model's experts over processes.

    Here, the complete model means the model as it was before its experts were distributed.

    Attributes:
        keys: the keys of the complete model's state dict.
        parameters: the complete model's number of parameters.
        names: the names of the complete model's trainable weights.
        stands_for: maps each expert weight of the complete model to the corresponding weight of this process's first
            expert.
        own: the names of this process's expert weights.
    """

    def __init__(self, model: nn.Module, group: Any):
        self.group = group
        self.size = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        self.keys = list(model.state_dict())
        self.parameters = sum(weight.numel() for weight in model.parameters())
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.stands_for: dict[str, str] = {}
        for prefix, module in model.named_modules():
            if isinstance(module, Experts):
                self._share(f"{prefix}.experts.", module)
        weights = dict(model.named_parameters())
        self.own = self.stands_for.keys() & weights.keys()
        for name in self.own:
            weights[name].expert = True  # type: ignore[attr-defined]  # fairseq reads this attribute
            weights[name].register_hook(partial(torch.mul, 1 / self.size))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(self.own))
        logger.info("experts: distributed over %d processes", self.size)

    def _share(self, prefix: str, module: Experts) -> None:
        each = module.count // self.size
        own = range(self.rank * each, (self.rank + 1) * each)
        for number in range(module.count):
            for name, _ in module.experts[str(number)].named_parameters():
                self.stands_for[f"{prefix}{number}.{name}"] = f"{prefix}{own[0]}.{name}"
        module.experts = nn.ModuleDict({str(number): module.experts[str(number)] for number in own})
        module.exchange = partial(exchange, self.group, self.size)

    def norm(self, norm: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """Return the gradient norm of the complete model.

        Args:
            norm: the gradient norm of the replicated weights, without any experts.
            weights: the weights in this process's optimizer; only the expert weights are used.
        """
        gradients = [each.grad for each in weights if hasattr(each, "expert") and each.grad is not None]
        squares_by_weight = [gradient.float().square().sum() for gradient in gradients]
        squares = torch.stack(squares_by_weight).sum()
        distributed.all_reduce(squares, group=self.group)
        return (norm.float() ** 2 + squares.to(norm.device)).sqrt()

    def own_weights(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Select this process's part of the complete model's state."""
        return {name: value for name, value in state.items() if name not in self.stands_for or name in self.own}

    def whole_weights(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Gather the complete model's state on the first process; return {} on the others.

        All processes must call this method.

        Args:
            state: the state of this process's model.
        """
        found = self._gathered({name: value for name, value in state.items() if name in self.own})
        both = {**state, **found}
        if self.rank == 0:
            in_order = {name: both[name] for name in self.keys if name in both}
            return {**in_order, **both}
        return {}

    def whole_optimizer(self, state: Mapping[str, Any], groups: Groups, updated: Sequence[Tensor]) -> dict[str, Any]:
        """Gather the complete model's optimizer state on the first process; return {} on the others.

        All processes must call this method.

        Args:
            state: the state of this process's optimizer.
            groups: the parameter groups of this process's optimizer.
            updated: the weights that the optimizer updates, in model order: either the model's weights or their
                single-precision copies.
        """
        local = self._names_of(groups, updated)
        numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
        moments = {}
        for name, number in zip(chain(*local), numbers, strict=True):
            moments[name] = state["state"].get(number)
        masters = dict(zip(self._local_names(), state.get(MASTERS, ()), strict=False))
        sent = {name: (moments[name], masters.get(name)) for name in moments.keys() & self.own}
        for name, (of_moments, master) in self._gathered(sent).items():
            moments[name] = of_moments
            masters[name] = master
        if self.rank:
            return {}

        names = self._whole_groups(local)
        param_groups = _numbered(state["param_groups"], names)
        whole_moments = {}
        for number, name in enumerate(chain(*names)):
            if moments[name] is not None:
                whole_moments[number] = moments[name]
        whole = {**state, "state": whole_moments, "param_groups": param_groups}
        if state.get(MASTERS):
            whole[MASTERS] = [masters[name] for name in self.names]
        return whole

    def own_optimizer(self, state: Mapping[str, Any], groups: Groups, updated: Sequence[Tensor]) -> dict[str, Any]:
        """Select this process's part of the complete model's optimizer state.

        Args:
            state: the complete model's optimizer state.
            groups: the parameter groups of this process's optimizer.
            updated: the weights that the optimizer updates, in model order.

        Raises:
            UserError: the state is for different weights, or for weights concatenated into one vector.
        """
        local = self._names_of(groups, updated)
        names = self._whole_groups(local)
        saved = [group["params"] for group in state["param_groups"]]
        if len(saved) != len(names):
            return dict(state)  # another optimizer's state, which this optimizer itself will reject
        if [*map(len, saved)] != [*map(len, names)]:
            raise UserError(
                "the checkpoint's optimizer state does not match the model's weights, or contains all weights in one "
                "vector, as saved with --fp16 by a single process; to start with a new state, pass --reset-optimizer"
            )

        saved_numbers = dict(zip(chain(*names), chain(*saved), strict=True))
        own_moments = {}
        for number, name in enumerate(chain(*local)):
            saved_number = saved_numbers[name]
            if saved_number in state["state"]:
                own_moments[number] = state["state"][saved_number]
        own = {**state, "state": own_moments, "param_groups": _numbered(state["param_groups"], local)}
        masters = dict(zip(self.names, state.get(MASTERS, ()), strict=False))
        if masters:
            own[MASTERS] = [masters[name] for name in self._local_names()]
        return own

    def _gathered(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Gather the named values of all processes on the first process; return {} on the others."""
        parts: Optional[list[Any]] = None
        if self.rank == 0:
            parts = [None] * self.size
        first = 0
        if self.group is not None:
            first = distributed.get_global_rank(self.group, 0)
        distributed.gather_object(tree_map_only(Tensor, Tensor.cpu, dict(mine)), parts, first, self.group)
        return {name: value for part in parts or () for name, value in part.items()}

    def _local_names(self) -> list[str]:
        return [name for name in self.names if name not in self.stands_for or name in self.own]

    def _names_of(self, groups: Groups, updated: Sequence[Tensor]) -> list[list[str]]:
        names = {id(weight): name for weight, name in zip(updated, self._local_names(), strict=True)}
        return [[names[id(weight)] for weight in group["params"]] for group in groups]

    def _whole_groups(self, local: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the complete model's weight names per parameter group, derived from this process's names."""
        whole = []
        for group in local:
            own = set(group)
            whole.append([name for name in self.names if self.stands_for.get(name, name) in own])
        return whole


def _numbered(groups: Groups, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return copies of parameter groups whose weights are numbered from 0 across all groups."""
    numbers = count()
    found = []
    for group, names_of_group in zip(groups, names, strict=True):
        found.append({**group, "params": [next(numbers) for _ in names_of_group]})
    return found


def exchange(group: Any, size: int, compute: Callable, x_PC: Tensor, counts_E: Tensor) -> Tensor:
    """Apply distributed experts to inputs sorted by expert, and return the outputs.

    Args:
        group: the process group.
        size: the number of processes.
        compute: a function that computes the outputs of this process's experts, given the inputs sorted by expert and
            the number of inputs per expert.
        x_PC: this process's inputs, sorted by expert.
        counts_E: the number of inputs per expert.
    """
    counts_RE = counts_E.view(size, -1).contiguous()  # one row per process
    received_RE = torch.empty_like(counts_RE)
    distributed.all_to_all_single(received_RE, counts_RE, group=group)
    sent = counts_RE.sum(1).tolist()
    received = received_RE.sum(1).tolist()
    arrived = _AllToAll.apply(x_PC, received, sent, group)
    numbers_E = torch.arange(received_RE.size(1), device=x_PC.device).repeat(size)
    by_expert = numbers_E.repeat_interleave(received_RE.flatten()).argsort(stable=True)
    outputs = compute(arrived.index_select(0, by_expert), received_RE.sum(0).tolist())
    return _AllToAll.apply(outputs.index_select(0, by_expert.argsort()), sent, received, group)


class _AllToAll(torch.autograd.Function):
    """A differentiable all-to-all exchange of rows.

    Rows are sent as bytes, which all communication back ends support.
    """

    @staticmethod
    def forward(ctx: Any, x_PC: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.how = sent, received, group
        arrived = x_PC.new_empty(sum(received), x_PC.size(1))
        parts = arrived.view(torch.uint8), x_PC.contiguous().view(torch.uint8)
        distributed.all_to_all_single(*parts, received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient_PC: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradient_PC, *ctx.how), None, None, None
