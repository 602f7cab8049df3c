"""Files are damaged, and fairseq's options of checkpoints without a run."""

import os
from argparse import Namespace


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def options(folder, **others):
    """fairseq's checkpoint options, by default as they are by default."""
    defaults = {"restore_file": "checkpoint_last.pt", "checkpoint_suffix": ""}
    defaults |= {"continue_once": None, "finetune_from_model": None, "no_save_optimizer_state": False}
    return Namespace(save_dir=str(folder), **{**defaults, **others})
