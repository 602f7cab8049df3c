"""Wrappers that let fairseq train on machines that it does not expect; ``hooks`` states what it does otherwise."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from fairseq import trainer
from fairseq.distributed import utils as distributed_utils

from lazyformer_fairseq.reliability.our_runs import names_task_of_ours


def training_on_cpu_under_torchrun(infer_init_method: Callable) -> Callable:
    """``infer_init_method(cfg)``: follows torchrun where there is no GPU."""

    @functools.wraps(infer_init_method)
    def infer(cfg, *args, **kwargs):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if torch.cuda.device_count() > 0 or cfg.distributed_init_method is not None or world_size == 1:
            return infer_init_method(cfg, *args, **kwargs)
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = world_size
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.distributed_no_spawn = True

    return infer


def broadcast_object(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """fairseq's ``_broadcast_object_slow``, by torch's own."""
    objects = [obj]
    torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]


def gathering_without_gpu(all_gather_list: Callable) -> Callable:
    """``all_gather_list(data)``, by torch's own where there is no GPU."""

    @functools.wraps(all_gather_list)
    def gather(data, group=None, max_size=None):
        group = group or distributed_utils.get_global_group()
        gathered = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, data, group=group)
        return gathered

    return all_gather_list if torch.cuda.is_available() else gather


def letting_bf16_run_on_gpus_and_cpus(parse_args_and_arch: Callable) -> Callable:
    """fairseq's parser; uses a TPU only where ``--tpu`` requests one."""

    @functools.wraps(parse_args_and_arch)
    def parse(parser, input_args=None, *args, **kwargs):
        parsed = parse_args_and_arch(parser, input_args, *args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if names_task_of_ours(namespace) and "--tpu" not in (sys.argv if input_args is None else input_args):
            namespace.tpu = False
        return parsed

    return parse


def letting_fp16_run_on_cpus(build_optimizer: Callable) -> Callable:
    """``FP16Optimizer.build_optimizer``: without a GPU weights stay apart."""

    @functools.wraps(build_optimizer)
    def build(cls, cfg, params, **kwargs):
        if not torch.cuda.is_available():
            cfg.common.fp16_no_flatten_grads = True
        return build_optimizer(cls, cfg, params, **kwargs)

    return build


def seeing_no_shared_parameter_where_there_is_none(catalog_shared_params: Callable) -> Callable:
    """``_catalog_shared_params(module)``, which calls itself for each submodule."""

    @functools.wraps(catalog_shared_params)
    def catalog(module, memo=None, prefix=""):
        shared = catalog_shared_params(module, memo, prefix)
        if memo is not None:
            return shared
        return [names for names in shared if trainer._get_module_by_path(module, names[0]) is not None]

    return catalog
