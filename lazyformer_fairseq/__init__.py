"""LazyFormer and PAR encoders for fairseq: what ``fairseq-train --user-dir lazyformer_fairseq`` loads.

Importing the package registers its models, tasks, criterions, optimizer and schedule with fairseq.
"""

import logging

# Importing fairseq has every library log everything (wav2vec2_classification.py); who imports us decides that.
_root = logging.getLogger()
_level_before, _handlers_before = _root.level, _root.handlers[:]
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # on import it asks for tensorboardX

from lazyformer_fairseq import fairseq_compat
from lazyformer_fairseq.criterions import causal_lm, masked_lm
from lazyformer_fairseq.criterions import glue as glue_criterion
from lazyformer_fairseq.models import CausalLanguageModel, LazyFormerModel
from lazyformer_fairseq.optim import fused_adam, linear_warmup
from lazyformer_fairseq.tasks import full_sentences_masked_lm, stream_language_modeling
from lazyformer_fairseq.tasks import glue as glue_task

fairseq_compat.install()
_root.setLevel(_level_before)
_root.handlers[:] = _handlers_before

__version__ = "0.1.0"
__all__ = [
    "CausalLanguageModel",
    "LazyFormerModel",
    "causal_lm",
    "full_sentences_masked_lm",
    "fused_adam",
    "glue_criterion",
    "glue_task",
    "linear_warmup",
    "masked_lm",
    "stream_language_modeling",
]
