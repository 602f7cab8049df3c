"""Logs of fairseq-train, written by fairseq's own progress bars."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq.logging import progress_bar

STAMPED = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
BERT = (
    "{'_name': None, 'common': {'_name': None, 'log_format': 'simple', 'seed': 1}, 'optimization': {'lr': [0.001]}, "
    "'model': {'_name': 'bert_tiny', 'sublayer_pattern': 'M1x2', 'encoder_embed_dim': 8, 'encoder_ffn_embed_dim': 16, "
    "'encoder_attention_heads': 2, 'activation_fn': gelu, 'max_positions': 32, 'relative_position_buckets': 0}, "
    "'task': {'_name': 'full_sentences_masked_lm', 'data': 'a:b', 'tokens_per_sample': 16, 'mask_prob': 0.25, "
    "'seed': 1}, 'ema': {'_name': None}}"
)
LAZY = BERT.replace("bert_tiny", "lazyformer_m2x6_s_tiny").replace("M1x2", "M2x1")
CAUSAL = (
    "{'_name': None, 'common': {'_name': None}, 'model': {'_name': 'par_transformer_tiny', 'sublayer_pattern': 'sff', "
    "'decoder_embed_dim': 8, 'decoder_ffn_embed_dim': 16, 'decoder_attention_heads': 2, 'mem_len': 4, "
    "'adaptive_softmax_cutoff': '', 'adaptive_softmax_factor': 1}, 'task': {'_name': 'stream_language_modeling', "
    "'tgt_len': 8}}"
)


class Log:
    """Writes a log as fairseq-train does: its bars print the numbers, its loggers the rest."""

    def __init__(self, kind: str):
        self.bar = {"simple": progress_bar.SimpleProgressBar, "json": progress_bar.JsonProgressBar}[kind]

    def start(self, config: str, symbols: int = 50) -> None:
        logging.getLogger("fairseq_cli.train").info(config)
        logging.getLogger("tasks").info("dictionary: %d symbols from %s", symbols, "data/dict.txt")

    def loaded(self, updates: int) -> None:
        message = "Loaded checkpoint {} (epoch {} @ {} updates)".format("a/checkpoint_last.pt", 1, updates)
        logging.getLogger("fairseq.trainer").info(message)

    def train(self, updates: int, wall: float, tokens: float = 100.0) -> None:
        bar = self.bar(list(range(10)), epoch=1, log_interval=1)
        bar.size, bar.i = 10, 1
        stats = {"loss": 9.5, "ppl": 700.0, "wpb": tokens, "bsz": 8, "num_updates": updates, "lr": 0.1, "wall": wall}
        bar.log(stats, tag="train_inner", step=1)

    def valid(self, updates: int, loss: float, split: str = "valid") -> None:
        bar = self.bar([], epoch=1, prefix=f"valid on '{split}' subset")
        bar.print({"loss": loss, "accuracy": 3.0, "wps": 5, "wpb": 7, "num_updates": updates}, tag=split)

    def end(self, updates: int, wall: float, tokens: float = 100.0) -> None:
        bar = self.bar([], epoch=1)
        bar.print({"loss": 9.0, "wpb": tokens, "num_updates": updates, "wall": wall}, tag="train")


@contextmanager
def writing(path: Path, kind: str = "simple", pattern: str = STAMPED) -> Iterator[Log]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(pattern))
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield Log(kind)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def write_run(path: Path, losses: Iterable[float], config: str = BERT, kind: str = "simple", **more) -> Path:
    """A run that is validated every 10 updates, each of 100 tokens and 36 seconds."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with writing(path, kind, **more) as log:
        log.start(config)
        for number, loss in enumerate(losses, 1):
            log.train(10 * number, 360 * number)
            log.valid(10 * number, loss)
    return path
