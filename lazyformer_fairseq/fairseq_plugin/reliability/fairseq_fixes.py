"""Wrappers that let fairseq train on machines that it does not expect; ``hooks`` states what it does otherwise."""

import os
from typing import Any

import torch
from fairseq import trainer
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics


def training_on_cpu_under_torchrun(infer_init_method, cfg, *args, **kwargs):
    """``infer_init_method(cfg)``: follows torchrun where there is no GPU."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.device_count() > 0 or cfg.distributed_init_method is not None or world_size == 1:
        return infer_init_method(cfg, *args, **kwargs)
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = world_size
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True


def broadcast_object(_, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """fairseq's ``_broadcast_object_slow``, by torch's own."""
    objects = [obj]
    torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]


def gathering_without_gpu(all_gather_list, data, group=None, max_size=16384):
    """``all_gather_list(data)``, by torch's own where there is no GPU."""
    if torch.cuda.is_available():
        return all_gather_list(data, group, max_size)
    group = group or distributed_utils.get_global_group()
    gathered = [None] * distributed_utils.get_world_size(group)
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered


def letting_fp16_run_on_cpus(build_optimizer, cls, cfg, params, **kwargs):
    """``FP16Optimizer.build_optimizer``: without a GPU weights stay apart."""
    if not torch.cuda.is_available():
        cfg.common.fp16_no_flatten_grads = True
    return build_optimizer(cls, cfg, params, **kwargs)


def seeing_no_shared_parameter_where_there_is_none(catalog_shared_params, module, memo=None, prefix=""):
    """``_catalog_shared_params(module)``, which calls itself for each submodule."""
    shared = catalog_shared_params(module, memo, prefix)
    if memo is not None:
        return shared
    return [names for names in shared if trainer._get_module_by_path(module, names[0]) is not None]


def forget_ended_contexts(reduce_and_log_stats, *args, **kwargs):
    """For ``Trainer._reduce_and_log_stats``, which opens a context of meters under a new random name each time.

    fairseq counts contexts by name and keeps the names of those that have ended: some 200 bytes an update, and a
    dictionary that it copies in each validation.
    """
    output = reduce_and_log_stats(*args, **kwargs)
    counts = metrics._active_aggregators_cnt
    for name in [name for name, count in counts.items() if not count]:
        del counts[name]
    return output


def averaging_numbers_alone(init, self, model, config, device=None, skip_keys=None):
    """``EMA.__init__``: takes the newest of what is not floating-point, such as ``dictionary_sha256``."""
    integers = {name for name, value in model.state_dict().items() if not value.is_floating_point()}
    init(self, model, config, device, integers | set(skip_keys or ()))
