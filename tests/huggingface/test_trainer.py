"""transformers' Trainer fine-tunes what was exported as our task fine-tunes the checkpoint."""

import math

import numpy as np
import pytest
import torch
from helpers import ROOT, write_toy_glue

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.criterions.glue import GlueCriterion
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.glue.encode import encode_split
from lazyformer_fairseq.data.glue.task_table import TASKS
from lazyformer_fairseq.huggingface.export.write import export_to_huggingface
from lazyformer_fairseq.huggingface.modelling import heads
