"""What a recipe of the language models is, as its published code has it."""

from omegaconf import DictConfig


def assert_recipe(cfg: DictConfig, name: str) -> None:
    """NVIDIA's wt103_base.yaml, wt103_large.yaml and lamb.py, or Transformer-XL's Adam."""
    schedule, optimizer = cfg.lr_scheduler, cfg.optimizer
    assert (schedule._name, cfg.optimization.clip_norm, optimizer.weight_decay) == ("cosine", 0.25, 0.0)
    assert cfg.model.init_std == (0.005 if name == "nvidia_large" else 0.02)
    assert cfg.task.roll == name.startswith("nvidia") and not cfg.task.varlen and not cfg.model.same_length
    if name == "transformer_xl":
        assert (optimizer._name, optimizer.adam_eps) == ("fused_adam", 1e-8)
        assert (cfg.optimization.lr, schedule.warmup_updates, schedule.min_lr) == ([2.5e-4], 1000, 0.0)
        return
    assert (optimizer._name, optimizer.lamb_eps, optimizer.max_weight_norm) == ("nvlamb", 1e-6, 10.0)
    assert optimizer.no_bias_correction and optimizer.lamb_betas.replace(" ", "") == "(0.9,0.999)"
    lowest, warmup = {"nvidia": (1e-3, 1000), "nvidia_large": (1e-4, 16_000)}[name]
    assert (cfg.optimization.lr, schedule.min_lr, schedule.warmup_updates) == ([0.01], lowest, warmup)
    assert schedule.warmup_init_lr == 0.0
