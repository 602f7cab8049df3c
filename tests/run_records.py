"""Records of runs, as both training loops write them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lazyformer_fairseq.training.run_record import MetricsLine, MetricsLog, RunRecord, finite_values, write_run

ENCODER = {
    "name": "bert_tiny",
    "sublayer_pattern": "M1x2",
    "encoder_embed_dim": 8,
    "encoder_ffn_embed_dim": 16,
    "encoder_attention_heads": 2,
    "max_positions": 32,
    "relative_position_buckets": 0,
}
MASKED = {"name": "full_sentences_masked_lm", "tokens_per_sample": 16, "mask_prob": 0.25, "vocab_size": 50}
BERT = {"model": ENCODER, "task": MASKED}
LAZY = {"model": {**ENCODER, "name": "lazyformer_m2x6_s_tiny", "sublayer_pattern": "M2x1"}, "task": MASKED}
CAUSAL = {
    "model": {
        "name": "par_transformer_tiny",
        "sublayer_pattern": "sff",
        "decoder_embed_dim": 8,
        "decoder_ffn_embed_dim": 16,
        "decoder_attention_heads": 2,
        "mem_len": 4,
        "adaptive_softmax_cutoff": "",
        "adaptive_softmax_factor": 1,
    },
    "task": {"name": "stream_language_modeling", "tgt_len": 8, "vocab_size": 50},
}


class Recorder:
    """Writes the record of a run into a folder, as far as it came."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] = BERT):
        folder.mkdir(parents=True, exist_ok=True)
        record = RunRecord(
            command=(),
            **settings,
            parameters=7,
            criterion={},
            data={},
            optimizer={},
            schedule={},
            batch={},
            precision="fp32",
            seed=1,
            processes=1,
            machine={},
            versions={},
        )
        write_run(folder, record)
        self.log = MetricsLog(folder)

    def train(self, updates: int, seconds: float, tokens_per_update: float = 100.0, loss: float = 9.5) -> None:
        self._append(updates, "train", seconds, loss=loss, wpb=tokens_per_update)

    def valid(self, updates: int, seconds: float, loss: float, split: str = "valid") -> None:
        self._append(updates, split, seconds, loss=loss)

    def _append(self, updates: int, split: str, seconds: float, **values: float) -> None:
        self.log.append(MetricsLine(updates, split, float(seconds), finite_values(values)))


def write_record(folder: Path, losses: Iterable[float], settings: Mapping[str, Any] = BERT) -> Path:
    """Write a run that is validated every 10 updates, each of 100 tokens and 36 seconds."""
    recorder = Recorder(folder, settings)
    for number, loss in enumerate(losses, 1):
        recorder.train(10 * number, 360 * number)
        recorder.valid(10 * number, 360 * number, loss)
    return folder
