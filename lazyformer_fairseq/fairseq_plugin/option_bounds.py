"""The bounds of all numeric options of fairseq-train, by name."""

from lazyformer_fairseq.data.datasets.token_streams import StreamOptions
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.options import AMOUNT, COUNT, COUNT_OR_NONE, COUNT_OR_UNLIMITED, Bounds, bounds_of
from lazyformer_fairseq.training.optimization import OPTIMIZERS, SCHEDULES

_OPTIMIZATION = [options for _, options in (*OPTIMIZERS.values(), *SCHEDULES.values())]

BOUNDS: dict[str, Bounds] = {
    **bounds_of(MaskedLMOptions, CausalLMOptions, MaskedTextOptions, StreamOptions),
    **bounds_of(*_OPTIMIZATION),
    # fairseq's own options, for which it accepts any number, and the options that our runs add.
    "batch_size": COUNT,
    "batch_size_valid": COUNT,
    "clip_norm": AMOUNT,
    "data_buffer_size": COUNT_OR_NONE,
    "distill_attention_weight": AMOUNT,
    "distill_temperature": AMOUNT,
    "distill_words_weight": AMOUNT,
    "end_learning_rate": AMOUNT,
    "fp16_init_scale": COUNT,
    "keep_interval_updates": COUNT_OR_UNLIMITED,
    "keep_last_epochs": COUNT_OR_UNLIMITED,
    "log_interval": COUNT,
    "log_seconds": AMOUNT,
    "loss_spike": AMOUNT,
    "lr": AMOUNT,
    "lr_period_updates": Bounds(-1),
    "max_epoch": COUNT_OR_NONE,
    "max_rollbacks": COUNT_OR_NONE,
    "max_sentences": COUNT,
    "max_skipped_updates": COUNT,
    "max_tokens": COUNT,
    "max_tokens_valid": COUNT,
    "max_update": COUNT_OR_NONE,
    "min_loss_scale": AMOUNT,
    "num_workers": COUNT_OR_NONE,
    "patience": COUNT_OR_UNLIMITED,
    "required_batch_size_multiple": COUNT,
    "save_interval": COUNT,
    "save_interval_updates": COUNT_OR_NONE,
    "seed": Bounds(0, below=2**32, is_whole=True),
    "sequences_per_update": COUNT,
    "stop_time_hours": AMOUNT,
    "total_num_update": COUNT_OR_NONE,
    "update_freq": COUNT,
    "validate_interval": COUNT,
    "validate_interval_updates": COUNT_OR_NONE,
}
