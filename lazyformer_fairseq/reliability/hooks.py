"""The one list of what of fairseq's training is wrapped to make a run safe, and why.

The logic is in the modules beside this one.
"""

import importlib
import sys

from fairseq import checkpoint_utils, file_utils, options
from fairseq.data import iterators
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models.ema import ema
from fairseq.optim import fp16_optimizer
from fairseq.trainer import Trainer
from torch.utils.data._utils import signal_handling

from lazyformer_fairseq.reliability.bad_updates import skipping as bad_updates
from lazyformer_fairseq.reliability.checkpoints import choice as checkpoint_choice
from lazyformer_fairseq.reliability.checkpoints import loading as checkpoint_loading
from lazyformer_fairseq.reliability.checkpoints import moving_average, untrusted
from lazyformer_fairseq.reliability.checkpoints import options as checkpoint_options
from lazyformer_fairseq.reliability.checkpoints import retention as checkpoint_retention
from lazyformer_fairseq.reliability.checkpoints import saving as checkpoint_saving
from lazyformer_fairseq.reliability.resume import data_order, exact_state, meters, task_memory
from lazyformer_fairseq.reliability.signals import preemption, spawned_processes


def install() -> None:
    """Applies all of it; called once, when the package is imported."""
    live_through_bad_numbers()
    stay_as_small_as_at_first()
    keep_checkpoints_whole()
    keep_what_tasks_carry()
    refuse_code_in_files()
    average_numbers_alone()
    go_on_exactly()
    end_when_asked()


def keep_checkpoints_whole() -> None:
    """fairseq writes one name by a rename, copies the others in place, checks nothing, and stops at a full disk."""
    options.parse_args_and_arch = checkpoint_options.refusing(options.parse_args_and_arch)
    # Not imported where it is started as `python -m`: then the parser has refused. Hydra does not ask the parser.
    if training := sys.modules.get("fairseq_cli.train"):
        training.add_defaults = checkpoint_options.refusing_of_hydra(training.add_defaults)
    checkpoint_utils.verify_checkpoint_directory = checkpoint_options.naming_the_folder(
        checkpoint_utils.verify_checkpoint_directory
    )
    checkpoint_utils.load_checkpoint_to_cpu = checkpoint_loading.checked(checkpoint_utils.load_checkpoint_to_cpu)
    # Which file a run starts from, when checkpoint_last.pt is damaged or missing.
    checkpoint_utils.load_checkpoint = checkpoint_choice.choosing(checkpoint_utils.load_checkpoint)
    # The first name, and those that it is copied to.
    checkpoint_utils.torch_persistent_save = checkpoint_saving.whole(checkpoint_utils.torch_persistent_save)
    PathManager.copy = staticmethod(checkpoint_saving.whole_copy(PathManager.copy))
    checkpoint_utils.save_checkpoint = checkpoint_saving.going_on(checkpoint_utils.save_checkpoint)
    # --keep-updates-list; and what --keep-interval-updates, --keep-last-epochs, --keep-best-checkpoints may remove.
    Trainer.get_train_iterator = checkpoint_retention.remembering_iterator(Trainer.get_train_iterator)
    Trainer.train_step = checkpoint_retention.keeping_listed_updates(Trainer.train_step)
    checkpoint_utils.os = checkpoint_retention.CarefulOs()


def keep_what_tasks_carry() -> None:
    """The memory of streams, of all workers, goes into checkpoints and comes back."""
    checkpoint_utils.save_checkpoint = task_memory.gather_before_saving(checkpoint_utils.save_checkpoint)
    Trainer.load_checkpoint = task_memory.give_back_after_loading(Trainer.load_checkpoint)


def live_through_bad_numbers() -> None:
    """A NaN ends a run of fairseq; here the update is skipped, counted, and after many in a row the run rolls back.

    First of all, so that a skipped update is one like others for whoever acts after an update.
    """
    # The losses of all processes, which fairseq sums anyway.
    Trainer._aggregate_logging_outputs = bad_updates.hear_all_processes(Trainer._aggregate_logging_outputs)
    # Last before the optimizer steps: the update is judged.
    Trainer.clip_grad_norm = bad_updates.find_bad_updates(Trainer.clip_grad_norm)
    # A bad one ends here, as if it had not been made.
    Trainer.train_step = bad_updates.skip_bad_updates(Trainer.train_step)
    # What was skipped so far, and which checkpoints there are to go back to.
    Trainer.save_checkpoint = bad_updates.save_counts(Trainer.save_checkpoint)
    Trainer.load_checkpoint = bad_updates.load_counts(Trainer.load_checkpoint)


def stay_as_small_as_at_first() -> None:
    """fairseq remembers something of each update."""
    Trainer._reduce_and_log_stats = meters.forget_ended_contexts(Trainer._reduce_and_log_stats)


def average_numbers_alone() -> None:
    """fairseq's moving average (``--store-ema``) multiplies all that a model holds, bytes too, and fails."""
    ema.EMA.__init__ = moving_average.skipping_what_is_no_number(ema.EMA.__init__)


def refuse_code_in_files() -> None:
    """A checkpoint or an archive that somebody else made could run code, or move files, when fairseq reads it."""
    untrusted.forbid_unsafe_loads()
    # Every checkpoint comes through here: to resume, to fine-tune, to evaluate, to use.
    checkpoint_utils.load_checkpoint_to_cpu = untrusted.load_without_code(checkpoint_utils.load_checkpoint_to_cpu)
    # Settings are values, not code: each module's own name `eval` comes before Python's.
    for name in untrusted.EVALUATING_MODULES:
        importlib.import_module(name).eval = untrusted.read_setting
    # A model given as .tar.gz.
    file_utils.load_archive_file = untrusted.check_archive_first(file_utils.load_archive_file)


def go_on_exactly() -> None:
    """fairseq resumes near where it was: with rounded weights, and with other data if the processes are others."""
    # Tasks and fairseq_cli.train look both names up here.
    iterators.EpochBatchIterator = data_order.ExactEpochBatchIterator
    iterators.GroupedIterator = data_order.ExactGroupedIterator
    for optimizer in (fp16_optimizer._FP16OptimizerMixin, fp16_optimizer._MemoryEfficientFP16OptimizerMixin):
        optimizer.state_dict = exact_state.save_precise_weights(optimizer.state_dict)
        optimizer.load_state_dict = exact_state.load_precise_weights(optimizer.load_state_dict)
    Trainer.load_checkpoint = exact_state.keep_between_epochs(Trainer.load_checkpoint)


def end_when_asked() -> None:
    """A signal kills a run of fairseq. Last of all, so that saving and updates are what the others made of them."""
    # Where fairseq itself starts a process a GPU.
    distributed_utils.call_main = spawned_processes.forward_signals(distributed_utils.call_main)
    # Called by fairseq's training alone, once, before the first update.
    checkpoint_utils.load_checkpoint = preemption.listen_from_here(checkpoint_utils.load_checkpoint)
    # Sums numbers of all processes in each update: one more makes them agree when to stop.
    Trainer._aggregate_logging_outputs = preemption.share_signals(Trainer._aggregate_logging_outputs)
    # fairseq asks for the time after each update has been logged, before it validates.
    Trainer.cumulative_training_time = preemption.save_after_update(Trainer.cumulative_training_time)
    Trainer.state_dict = preemption.no_saving_meanwhile(Trainer.state_dict)  # it asks for the time, too
    Trainer.valid_step = preemption.save_after_validation_batch(Trainer.valid_step)
    Trainer.train_step = preemption.end_before_update(Trainer.train_step)
    signal_handling._set_worker_signal_handlers = preemption.leave_signals_to_the_run(
        signal_handling._set_worker_signal_handlers
    )
