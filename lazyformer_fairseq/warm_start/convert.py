"""A checkpoint of ours becomes a folder with the warm start of another pattern: part of ``lazyformer import``."""

from pathlib import Path

from lazyformer_fairseq.files.whole import whole_folder
from lazyformer_fairseq.models.export import write_model
from lazyformer_fairseq.models.hub import LazyFormerHub, assemble
from lazyformer_fairseq.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.warm_start.options import WarmOptions
from lazyformer_fairseq.warm_start.record import write_record
from lazyformer_fairseq.warm_start.start import Trained


def convert(checkpoint: Path, out: Path, warm: WarmOptions) -> None:
    """Writes OUT as ``lazyformer export`` does, whole or not at all, with the record and its page beside.

    Args:
        checkpoint: of ours, or a folder of checkpoints.
        out: must not exist yet, or be empty.

    Raises:
        UserError: as :func:`lazyformer_fairseq.models.hub.load` and :meth:`WarmOptions.start` do.
    """
    loaded = LazyFormerModel.from_pretrained(checkpoint)
    old = Trained(loaded.model.cfg, loaded.model.state_dict(), loaded.tokenizer.dictionary)
    start = warm.start(old, loaded.tokenizer, checkpoint.absolute().name)
    model = assemble(LazyFormerModel, start.new.cfg, start.new.dictionary, start.new.weights)
    model.load_state_dict(dict(start.new.weights))
    with whole_folder(out) as unfinished:
        write_model(LazyFormerHub(model, loaded.tokenizer), unfinished)
        write_record(unfinished, start.record)
