"""The one table of what we replace in fairseq, torch and Python, and why; ``installing`` puts its rows in place.

Rows of one target wrap each other in the table's order, the last one outermost. The table itself imports nothing, so
that a command line can read it before it loads fairseq.
"""

from dataclasses import dataclass
from enum import Enum

WRITTEN_FOR = "fairseq-fixed 0.12.3.1"


class Stage(Enum):
    """When a hook is put in place."""

    NAME = "before our architectures take their names"
    REGISTRATION = "with the registration; passes through unless the command names a task of ours"
    LOADING = "when a run of ours starts, and while one of our models is loaded without a run"
    RUN = "when a run of one of our tasks or commands starts; to the end of the process"
    COMMAND_LINE = "when such a run is a process of its own, not a notebook's"


class How(Enum):
    """What becomes of a wrapper."""

    AROUND = "called in the target's place, with what stood there before the arguments"
    INSTEAD = "takes the target's place"
    MAKES = "called once, with what stands there; what it returns takes the target's place"


@dataclass(frozen=True)
class Hook:
    """A row.

    Attributes:
        stage: when it is put in place.
        target: ``module:name`` or ``module:Class.name``.
        wrapper: ``module:name`` in this package; the parameters that it names are the target's.
        why: what fairseq does otherwise.
        how: what becomes of the wrapper.
        copies: modules that, where they are loaded, have imported the target by its name.
    """

    stage: Stage
    target: str
    wrapper: str
    why: str
    how: How = How.AROUND
    copies: tuple[str, ...] = ()


def _hooks(
    stage: Stage, module: str, *rows: tuple[str, str, str], how: How = How.AROUND, copies: tuple[str, ...] = ()
) -> list[Hook]:
    """Hooks whose wrappers are in one module: target, wrapper's name and reason of each."""
    return [Hook(stage, to, f"{module}:{name}", why, how, copies) for to, name, why in rows]


# Modules of fairseq that call eval() on settings. Those of a model come from its checkpoint, which also names
# the fairseq model: with fconv_lm, fairseq ran whatever stood in decoder_layers.
EVALUATING_MODULES = (
    "fairseq.criterions.ctc",
    "fairseq.data.audio.raw_audio_dataset",
    "fairseq.data.codedataset",
    "fairseq.models.fconv",
    "fairseq.models.fconv_lm",
    "fairseq.models.fconv_self_att",
    "fairseq.models.hubert.hubert",
    "fairseq.models.lightconv_lm",
    "fairseq.models.speech_to_text.s2t_wav_transformer",
    "fairseq.models.transformer_lm",
    "fairseq.models.wav2vec.wav2vec",
    "fairseq.models.wav2vec.wav2vec2",
    "fairseq.optim.adafactor",
    "fairseq.optim.adam",
    "fairseq.optim.adamax",
    "fairseq.optim.cpu_adam",
    "fairseq.optim.fused_lamb",
    "fairseq.utils",
)
# Where fairseq's training is: by its name, or started as `python -m fairseq_cli.train`, there and in its children.
TRAINING = ("fairseq_cli.train", "fairseq_cli.hydra_train", "__main__", "__mp_main__")
FP16_OPTIMIZERS = ("_FP16OptimizerMixin", "_MemoryEfficientFP16OptimizerMixin")
NAME, REGISTRATION, LOADING, RUN, COMMAND_LINE = Stage

# fmt: off
HOOKS = (
    *_hooks(NAME, "models.presets",
        ("fairseq.models:ARCH_MODEL_NAME_REGISTRY", "without_bert_base",
         "fairseq's legacy masked_lm model calls a preset bert_base, and would refuse ours"),
        how=How.MAKES),
    # Which command is one of ours.
    *_hooks(REGISTRATION, "reliability.our_runs",
        ("fairseq.options:parse_args_and_arch", "starting_when_parsed",
         "a run starts: fairseq's command lines parse their options, of which some cannot be met or mean a TPU"),
        ("fairseq.utils:import_user_module", "importing_one_plugin",
         "another copy of this package, given as --user-dir, ends in a traceback that names one of the two"),
        ("fairseq.trainer:Trainer.__init__", "starting_with_trainer", "a run starts: of a script that parses nothing")),
    *_hooks(REGISTRATION, "reliability.our_runs",
        ("fairseq.dataclass.initialize:add_defaults", "starting_with_defaults",
         "a run starts: hydra, and each process that fairseq starts, call this first after they import us"),
        copies=TRAINING),
    *_hooks(REGISTRATION, "reliability.signals.spawned_processes",
        ("fairseq.distributed.utils:call_main", "forward_signals",
         "the processes that fairseq starts for its GPUs hear no signals, and their exit code is lost")),
    # Reading files that somebody else wrote. Every checkpoint comes through here: to resume, to fine-tune, to use.
    *_hooks(LOADING, "reliability.checkpoints.loading",
        ("fairseq.checkpoint_utils:load_checkpoint_to_cpu", "checked",
         "a damaged checkpoint ends in whatever its unpickler raises")),
    *_hooks(LOADING, "models.safetensors_files",
        ("fairseq.checkpoint_utils:load_checkpoint_to_cpu", "reading_safetensors",
         "a model that `lazyformer export` wrote is no pickle")),
    *_hooks(LOADING, "reliability.checkpoints.untrusted",
        ("os:environ", "forbid_unsafe_loads", "a variable of the environment switches torch's protection off"),
        how=How.MAKES),
    *_hooks(LOADING, "reliability.checkpoints.untrusted",
        ("fairseq.checkpoint_utils:load_checkpoint_to_cpu", "load_without_code",
         "the variable may be set meanwhile, and options in older checkpoints need a name"),
        ("fairseq.file_utils:load_archive_file", "check_archive_first",
         "a model given as .tar.gz is unpacked with its links and absolute names, and what they name is moved")),
    *_hooks(LOADING, "reliability.checkpoints.untrusted", *(
        (f"{module}:eval", "read_setting", "settings of a checkpoint are run; a module's name comes before Python's")
        for module in EVALUATING_MODULES),
        how=How.INSTEAD),
    # Processes and precision on machines that fairseq does not expect.
    *_hooks(RUN, "reliability.fairseq_fixes",
        ("fairseq.distributed.utils:infer_init_method", "training_on_cpu_under_torchrun",
         "fairseq divides the number of processes by that of the GPUs, 0 perhaps"),
        ("fairseq.distributed.utils:_broadcast_object_slow", "broadcast_object",
         "settings are sent through torch.load, which refuses them since torch 2.6: no run of several could resume"),
        ("fairseq.distributed.utils:all_gather_list", "gathering_without_gpu",
         "what is no tensor is gathered through GPU memory, even where there is no GPU"),
        ("fairseq.optim.fp16_optimizer:FP16Optimizer.build_optimizer", "letting_fp16_run_on_cpus",
         "to join all weights to one vector fairseq asks for the current GPU"),
        ("fairseq.trainer:_catalog_shared_params", "seeing_no_shared_parameter_where_there_is_none",
         "all linear maps without a bias are taken to share one, the parameter None, and a line is logged for each"),
        ("fairseq.trainer:Trainer._reduce_and_log_stats", "forget_ended_contexts",
         "meters remember something of each update for ever"),
        ("fairseq.models.ema.ema:EMA.__init__", "averaging_numbers_alone",
         "the moving average (--store-ema) multiplies all that a model holds, bytes too, and fails")),
    *_hooks(RUN, "optim.warmup",
        ("fairseq.trainer:Trainer.get_train_iterator", "telling_updates_per_epoch",
         "schedules are built before data; ours with --max-epoch need the updates of an epoch")),
    *_hooks(RUN, "optim.nvlamb",
        ("fairseq.optim.fp16_optimizer:FP16Optimizer.build_optimizer", "keeping_tensors_apart",
         "--fp16 joins all weights to one vector; nvlamb has a ratio for each tensor")),
    *_hooks(RUN, "optim.gradient_sums",
        ("fairseq.trainer:Trainer.train_step", "adding_many_in_fp32",
         "fp16 and bf16: the gradients of an update's batches are added in the weights' precision"),
        ("fairseq.optim.fp16_optimizer:_FP16OptimizerMixin.backward", "adding_the_batch_before", "the next batch adds"),
        ("fairseq.optim.fp16_optimizer:_FP16OptimizerMixin._sync_fp16_grads_to_fp32", "adding_the_last_batch",
         "the sum is overwritten")),
    *_hooks(RUN, "reliability.out_of_memory",
        ("fairseq.trainer:Trainer.train_step", "end_where_memory_ends",
         "a batch that does not fit is left out in silence, and where none fits a run makes no update for ever"),
        ("fairseq.trainer:Trainer.valid_step", "end_where_memory_ends_in_validation",
         "a batch that does not fit, twice, ends in a traceback")),
    # A NaN ends a run of fairseq; here the update is skipped, counted, and after many in a row the run rolls back.
    # Before all others, so that whoever acts after an update sees a skipped one like any other.
    *_hooks(RUN, "reliability.bad_updates.skipping",
        ("fairseq.trainer:Trainer._aggregate_logging_outputs", "hear_all_processes",
         "fairseq sums the losses of all processes here; the guard hears them"),
        ("fairseq.trainer:Trainer.clip_grad_norm", "find_bad_updates",
         "the last call before the optimizer steps: the guard judges the update"),
        ("fairseq.trainer:Trainer.train_step", "skip_bad_updates",
         "a bad update ends here, as if nobody had made it"),
        ("fairseq.trainer:Trainer.save_checkpoint", "save_counts", "the checkpoint keeps what was skipped so far"),
        ("fairseq.trainer:Trainer.load_checkpoint", "load_counts",
         "the guard hears what was skipped so far, and which checkpoints it may roll back to")),
    # fairseq writes one name by a rename, copies the others in place, checks nothing, and stops at a full disk.
    *_hooks(RUN, "reliability.checkpoints.choice",
        ("fairseq.checkpoint_utils:load_checkpoint", "choosing",
         "where checkpoint_last.pt is damaged the run stops, where it is missing it starts anew")),
    *_hooks(RUN, "reliability.checkpoints.saving",
        ("fairseq.checkpoint_utils:verify_checkpoint_directory", "naming_the_folder",
         "a folder that cannot be written to ends in a traceback"),
        ("fairseq.checkpoint_utils:torch_persistent_save", "whole",
         "the first name: three tries on one file handle write broken files"),
        ("fairseq.file_io:PathManager.copy", "whole_copy", "the names that it is copied to"),
        ("fairseq.checkpoint_utils:save_checkpoint", "training_on", "a full disk ends the run")),
    *_hooks(RUN, "reliability.checkpoints.retention",
        ("fairseq.trainer:Trainer.get_train_iterator", "remembering_iterator",
         "whoever saves between epochs needs the iterator in use"),
        ("fairseq.trainer:Trainer.train_step", "keeping_listed_updates", "--keep-updates-list")),
    *_hooks(RUN, "reliability.checkpoints.retention",
        ("fairseq.checkpoint_utils:os", "CarefulOs",
         "--keep-interval-updates, --keep-last-epochs and --keep-best-checkpoints may remove the last intact one"),
        how=How.MAKES),
    # fairseq resumes near where it was: with rounded weights, and with other data if the processes differ.
    *_hooks(RUN, "reliability.resume.exact_state",
        ("fairseq.checkpoint_utils:save_checkpoint", "gather_memory",
         "fairseq asks the first process alone what its task carries, when the others have left for the next update"),
        ("fairseq.trainer:Trainer.load_checkpoint", "give_memory_back",
         "fairseq sends the extra state to all processes, but not to the task"),
        ("fairseq.trainer:Trainer.load_checkpoint", "keep_the_clock_running",
         "within an epoch fairseq loads the stopwatch `wall` from the checkpoint, stopped: it reads 0 from then on"),
        *(
            (f"fairseq.optim.fp16_optimizer:{optimizer}.{method}", wrapper,
             "of weights trained in fp16 or bf16 the rounded ones alone are saved")
            for optimizer in FP16_OPTIMIZERS
            for method, wrapper in (("state_dict", "save_precise_weights"), ("load_state_dict", "load_precise_weights"))
        ),
        ("fairseq.trainer:Trainer.load_checkpoint", "keep_between_epochs",
         "of an epoch that is over, the schedule does not hear its validation, and averages start anew")),
    *_hooks(RUN, "reliability.resume.other_optimizer",
        ("fairseq.trainer:Trainer.load_checkpoint", "name_what_differs",
         "a checkpoint of another optimizer or criterion ends in a traceback")),
    # Tasks and fairseq_cli.train look both iterators up there.
    *_hooks(RUN, "reliability.resume.data_order",
        ("fairseq.data.iterators:EpochBatchIterator", "ExactEpochBatchIterator",
         "its place in an epoch means nothing to another number of processes or batch size"),
        ("fairseq.data.iterators:GroupedIterator", "ExactGroupedIterator",
         "an epoch that is resumed between two updates loses its last one"),
        how=How.INSTEAD),
    # A signal kills a run of fairseq. Last of all, so that these wrap saving and updates as the others left them.
    *_hooks(RUN, "reliability.signals.preemption",
        ("fairseq.checkpoint_utils:load_checkpoint", "listen_from_here",
         "signals are heard from here on: called by training alone, once, before the first update"),
        ("fairseq.trainer:Trainer._aggregate_logging_outputs", "share_signals",
         "fairseq sums numbers of all processes in each update: one more makes them agree when to stop"),
        ("fairseq.trainer:Trainer.cumulative_training_time", "save_after_update",
         "fairseq asks for it after it has logged an update, before validation: the place to save at"),
        ("fairseq.trainer:Trainer.state_dict", "no_saving_meanwhile", "it asks for the time, too"),
        ("fairseq.trainer:Trainer.valid_step", "save_after_validation_batch",
         "validation may be long: a signal saves after the batch under way"),
        ("fairseq.trainer:Trainer.train_step", "end_before_update", "a run that has saved ends before its next update"),
        ("torch.utils.data._utils.signal_handling:_set_worker_signal_handlers", "leave_signals_to_the_run",
         "a data worker that dies of a signal ends the run before it has saved")),
    *_hooks(COMMAND_LINE, "reliability.command_line",
        ("sys:excepthook", "printing_user_errors", "a user's mistake, and Ctrl-C, are a line and no traceback"),
        ("warnings:filters", "without_warnings_nobody_can_act_on",
         "hydra and torch are called in ways that they deprecate: each run would start with a page of warnings"),
        how=How.MAKES),
)
# fmt: on
