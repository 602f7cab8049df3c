"""What ``lazyformer import`` does: reads a model of whatever kind, and writes it as a checkpoint of ours."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional

from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.fairseq_plugin.models import hub
from lazyformer_fairseq.fairseq_plugin.models.export import write_model
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.huggingface.reading.convert import AUTO
from lazyformer_fairseq.huggingface.reading.source import is_ours, read_source
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.warm_start.options import WarmOptions
from lazyformer_fairseq.warm_start.record import write_record
from lazyformer_fairseq.warm_start.start import Trained


def import_to(
    path: Path,
    out: Path,
    token_types: str = AUTO,
    head_name: Optional[str] = None,
    checkpoint_file: Optional[str] = None,
    warm: Optional[WarmOptions] = None,
) -> list[str]:
    """Writes the model at `path` to the folder `out`, whole or not at all. Returns what a user should know of it.

    Args:
        path, token_types, head_name, checkpoint_file: see :func:`~lazyformer_fairseq.huggingface.reading.source
            .read_source`.
        out: must not exist yet, or be empty.
        warm: what changes of the model; then ``warm_start.json`` and ``warm_start.md`` say what became what.

    Raises:
        UserError: what :func:`read_source` and :meth:`WarmOptions.start` raise, or `out` exists.
    """
    if path.exists() and not is_ours(path):
        refuse_without_extra("huggingface", "lazyformer import")
    with TemporaryDirectory(prefix="lazyformer") as scratch:
        source = read_source(path, Path(scratch), token_types, head_name, checkpoint_file)
        record = None
        if warm is not None:
            old = Trained(source.cfg, source.weights, source.tokenizer.dictionary)
            start = warm.start(old, source.tokenizer, path.absolute().name)
            source = replace(source, cfg=start.new.cfg, weights=dict(start.new.weights))
            record = start.record
        loaded = hub.as_hub(LazyFormerModel, source.cfg, source.weights, source.tokenizer, path)
        with atomic_folder(out) as unfinished:
            write_model(loaded, unfinished)
            if record is not None:
                write_record(unfinished, record)
    return source.notes
