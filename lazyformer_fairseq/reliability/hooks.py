"""The one table of what we replace in fairseq, torch and Python, and why; ``installing`` puts its rows in place.

Rows of one target wrap each other in the table's order, the last one outermost. The table itself imports nothing, so
that a command line can read it before it loads fairseq.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Optional

WRITTEN_FOR = "fairseq-fixed 0.12.3.1"


class Stage(Enum):
    """When a hook is put in place."""

    NAME = "before our architectures take their names"
    REGISTRATION = "with the registration; passes through unless the command names a task of ours"
    LOADING = "when a run of ours starts, and while one of our models is loaded without a run"
    RUN = "when a run of one of our tasks or commands starts; to the end of the process"
    COMMAND_LINE = "when such a run is a process of its own, not a notebook's"


@dataclass(frozen=True)
class Hook:
    """A row.

    Attributes:
        stage: when it is put in place.
        target: ``module:name`` or ``module:Class.name``.
        signature: the target's, without annotations, as inspect writes it; None where there is none to check.
        wrapper: ``module:name`` in this package: takes what stands there and returns what replaces it.
        why: what fairseq does otherwise.
        replaces: `wrapper` itself takes the target's place.
        copies: modules that, where they are loaded, have imported the target by its name.
    """

    stage: Stage
    target: str
    signature: Optional[str]
    wrapper: str
    why: str
    replaces: bool = False
    copies: tuple[str, ...] = ()


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

_PARSE = "(parser, input_args=None, parse_known=False, suppress_defaults=False, modify_parser=None)"
_TRAIN_STEP = "(self, samples, raise_oom=False)"
_AGGREGATE = "(self, logging_outputs, *extra_stats_to_sum, ignore=False)"
_GET_TRAIN_ITERATOR = (
    "(self, epoch, combine=True, load_dataset=True, data_selector=None, shard_batch_itr=True, "
    "disable_iterator_cache=False)"
)
_EPOCH_ITERATOR = (
    "(dataset, collate_fn, batch_sampler, seed=1, num_shards=1, shard_id=0, num_workers=0, epoch=1, buffer_size=0, "
    "timeout=0, disable_shuffling=False, skip_remainder_batch=False, grouped_shuffling=False, reuse_dataloader=False, "
    "persistent_workers=True)"
)
_LOAD = "(path, arg_overrides=None, load_on_all_ranks=False)"
_LOAD_TRAINER = (
    "(self, filename, reset_optimizer=False, reset_lr_scheduler=False, optimizer_overrides=None, reset_meters=False)"
)

NAME, REGISTRATION, LOADING, RUN, COMMAND_LINE = Stage

# fmt: off
HOOKS = (
    Hook(NAME, "fairseq.models:ARCH_MODEL_NAME_REGISTRY", None,
         "models.presets:without_bert_base",
         "fairseq's legacy masked_lm model calls a preset bert_base, and would refuse ours"),
    # Which command is one of ours.
    Hook(REGISTRATION, "fairseq.options:parse_args_and_arch", _PARSE,
         "reliability.our_runs:starting_when_parsed", "a run starts: fairseq's command lines parse their options"),
    Hook(REGISTRATION, "fairseq.dataclass.initialize:add_defaults", "(cfg)",
         "reliability.our_runs:starting_with_defaults",
         "a run starts: under hydra, and in each process that fairseq starts, it is the first call after our import",
         copies=TRAINING),
    Hook(REGISTRATION, "fairseq.trainer:Trainer.__init__", "(self, cfg, task, model, criterion, quantizer=None)",
         "reliability.our_runs:starting_with_trainer", "a run starts: of a script that builds all by itself"),
    Hook(REGISTRATION, "fairseq.distributed.utils:call_main", "(cfg, main, **kwargs)",
         "reliability.signals.spawned_processes:forward_signals",
         "the processes that fairseq starts for its GPUs hear no signals, and their exit code is lost"),
    Hook(REGISTRATION, "fairseq.options:parse_args_and_arch", _PARSE,
         "reliability.fairseq_fixes:letting_bf16_run_on_gpus_and_cpus",
         "--bf16 on the command line is taken for the wish to run on a TPU, and one is looked for"),
    Hook(REGISTRATION, "fairseq.options:parse_args_and_arch", _PARSE,
         "reliability.checkpoints.options:refusing",
         "options of checkpoints that cannot be met are refused before anything is trained"),
    Hook(REGISTRATION, "fairseq.dataclass.initialize:add_defaults", "(cfg)",
         "reliability.checkpoints.options:refusing_of_hydra", "the same; hydra does not ask the parser",
         copies=TRAINING),
    Hook(REGISTRATION, "fairseq.dataclass.initialize:add_defaults", "(cfg)",
         "reliability.update_size:settling",
         "an update grows and shrinks with the number of GPUs, unless --update-freq is worked out anew by hand",
         copies=TRAINING),
    # Reading files that somebody else wrote. Every checkpoint comes through here: to resume, to fine-tune, to use.
    Hook(LOADING, "fairseq.checkpoint_utils:load_checkpoint_to_cpu", _LOAD,
         "reliability.checkpoints.loading:checked", "a damaged checkpoint ends in whatever its unpickler raises"),
    Hook(LOADING, "fairseq.checkpoint_utils:load_checkpoint_to_cpu", _LOAD,
         "models.safetensors_files:reading_safetensors", "a model that `lazyformer export` wrote is no pickle"),
    Hook(LOADING, "fairseq.checkpoint_utils:load_checkpoint_to_cpu", _LOAD,
         "reliability.checkpoints.untrusted:load_without_code",
         "a variable of the environment switches torch's protection off, and options in older checkpoints need a name"),
    *(
        Hook(LOADING, f"{module}:eval", None,
             "reliability.checkpoints.untrusted:read_setting",
             "settings of a checkpoint are run; a module's own name comes before Python's", replaces=True)
        for module in EVALUATING_MODULES
    ),
    Hook(LOADING, "fairseq.file_utils:load_archive_file", "(archive_file)",
         "reliability.checkpoints.untrusted:check_archive_first",
         "a model given as .tar.gz is unpacked with its links and absolute names, and what they name is moved"),
    # Processes and precision on machines that fairseq does not expect.
    Hook(RUN, "fairseq.distributed.utils:infer_init_method", "(cfg, force_distributed=False)",
         "reliability.fairseq_fixes:training_on_cpu_under_torchrun",
         "the number of processes is divided by that of the GPUs, 0 perhaps"),
    Hook(RUN, "fairseq.distributed.utils:_broadcast_object_slow", "(obj, src_rank, group, dist_device)",
         "reliability.fairseq_fixes:broadcast_object",
         "settings are sent through torch.load, which since torch 2.6 refuses them: no run of several could be resumed",
         replaces=True),
    Hook(RUN, "fairseq.distributed.utils:all_gather_list", "(data, group=None, max_size=16384)",
         "reliability.fairseq_fixes:gathering_without_gpu",
         "what is no tensor is gathered through GPU memory, even where there is no GPU"),
    Hook(RUN, "fairseq.optim.fp16_optimizer:FP16Optimizer.build_optimizer", "(cfg, params, **kwargs)",
         "reliability.fairseq_fixes:letting_fp16_run_on_cpus",
         "to join all weights to one vector the current GPU is asked for"),
    Hook(RUN, "fairseq.trainer:_catalog_shared_params", "(module, memo=None, prefix='')",
         "reliability.fairseq_fixes:seeing_no_shared_parameter_where_there_is_none",
         "all linear maps without a bias are taken to share one, the parameter None, and a line is logged for each"),
    Hook(RUN, "fairseq.trainer:Trainer.get_train_iterator", _GET_TRAIN_ITERATOR,
         "optim.linear_warmup:telling_updates_per_epoch",
         "schedules are built before data; linear_warmup with --max-epoch needs the updates of an epoch"),
    # A NaN ends a run of fairseq; here the update is skipped, counted, and after many in a row the run rolls back.
    # Before all others, so that whoever acts after an update sees a skipped one like any other.
    Hook(RUN, "fairseq.trainer:Trainer._aggregate_logging_outputs", _AGGREGATE,
         "reliability.bad_updates.skipping:hear_all_processes",
         "the losses of all processes, which fairseq sums anyway, are heard"),
    Hook(RUN, "fairseq.trainer:Trainer.clip_grad_norm", "(self, clip_norm)",
         "reliability.bad_updates.skipping:find_bad_updates", "last before the optimizer steps: the update is judged"),
    Hook(RUN, "fairseq.trainer:Trainer.train_step", _TRAIN_STEP,
         "reliability.bad_updates.skipping:skip_bad_updates", "a bad update ends here, as if it had not been made"),
    Hook(RUN, "fairseq.trainer:Trainer.save_checkpoint", "(self, filename, extra_state)",
         "reliability.bad_updates.skipping:save_counts", "what was skipped so far is kept"),
    Hook(RUN, "fairseq.trainer:Trainer.load_checkpoint", _LOAD_TRAINER,
         "reliability.bad_updates.skipping:load_counts",
         "what was skipped so far, and which checkpoints there are to go back to"),
    Hook(RUN, "fairseq.trainer:Trainer._reduce_and_log_stats", "(self, logging_outputs, sample_size, grad_norm=None)",
         "reliability.resume.meters:forget_ended_contexts", "something of each update is remembered for ever"),
    # fairseq writes one name by a rename, copies the others in place, checks nothing, and stops at a full disk.
    Hook(RUN, "fairseq.checkpoint_utils:verify_checkpoint_directory", "(save_dir)",
         "reliability.checkpoints.options:naming_the_folder", "a folder that cannot be written to ends in a traceback"),
    Hook(RUN, "fairseq.checkpoint_utils:load_checkpoint", "(cfg, trainer, **passthrough_args)",
         "reliability.checkpoints.choice:choosing",
         "where checkpoint_last.pt is damaged the run stops, where it is missing it starts anew"),
    Hook(RUN, "fairseq.checkpoint_utils:torch_persistent_save", "(obj, filename, async_write=False)",
         "reliability.checkpoints.saving:whole", "the first name: three tries on one file handle write broken files"),
    Hook(RUN, "fairseq.file_io:PathManager.copy", "(src_path, dst_path, overwrite=False)",
         "reliability.checkpoints.saving:whole_copy", "the names that it is copied to"),
    Hook(RUN, "fairseq.checkpoint_utils:save_checkpoint", "(cfg, trainer, epoch_itr, val_loss)",
         "reliability.checkpoints.saving:going_on", "a full disk ends the run"),
    Hook(RUN, "fairseq.trainer:Trainer.get_train_iterator", _GET_TRAIN_ITERATOR,
         "reliability.checkpoints.retention:remembering_iterator",
         "whoever saves between epochs needs the iterator in use"),
    Hook(RUN, "fairseq.trainer:Trainer.train_step", _TRAIN_STEP,
         "reliability.checkpoints.retention:keeping_listed_updates", "--keep-updates-list"),
    Hook(RUN, "fairseq.checkpoint_utils:os", None,
         "reliability.checkpoints.retention:CarefulOs",
         "--keep-interval-updates, --keep-last-epochs and --keep-best-checkpoints may remove the last intact one"),
    # Checkpoints save and restore the memory of the streams of all workers.
    Hook(RUN, "fairseq.checkpoint_utils:save_checkpoint", "(cfg, trainer, epoch_itr, val_loss)",
         "reliability.resume.task_memory:gather_before_saving",
         "the first process alone is asked what its task carries, when the others have gone on"),
    Hook(RUN, "fairseq.trainer:Trainer.load_checkpoint", _LOAD_TRAINER,
         "reliability.resume.task_memory:give_back_after_loading",
         "the extra state is sent to all processes, but not to the task"),
    Hook(RUN, "fairseq.models.ema.ema:EMA.__init__", "(self, model, config, device=None, skip_keys=None)",
         "reliability.checkpoints.moving_average:skipping_what_is_no_number",
         "the moving average (--store-ema) multiplies all that a model holds, bytes too, and fails"),
    # fairseq resumes near where it was: with rounded weights, and with other data if the processes differ. Tasks
    # and fairseq_cli.train look both iterators up there.
    Hook(RUN, "fairseq.data.iterators:EpochBatchIterator", _EPOCH_ITERATOR,
         "reliability.resume.data_order:ExactEpochBatchIterator",
         "its place in an epoch means nothing to another number of processes or batch size", replaces=True),
    Hook(RUN, "fairseq.data.iterators:GroupedIterator", "(iterable, chunk_size, skip_remainder_batch=False)",
         "reliability.resume.data_order:ExactGroupedIterator",
         "an epoch that is resumed between two updates loses its last one", replaces=True),
    *(
        Hook(RUN, f"fairseq.optim.fp16_optimizer:{optimizer}.{method}", signature,
             f"reliability.resume.exact_state:{wrapper}",
             "of weights trained in fp16 or bf16 the rounded ones alone are saved")
        for optimizer in ("_FP16OptimizerMixin", "_MemoryEfficientFP16OptimizerMixin")
        for method, signature, wrapper in (
            ("state_dict", "(self)", "save_precise_weights"),
            ("load_state_dict", "(self, state_dict, optimizer_overrides=None)", "load_precise_weights"),
        )
    ),
    Hook(RUN, "fairseq.trainer:Trainer.load_checkpoint", _LOAD_TRAINER,
         "reliability.resume.exact_state:keep_between_epochs",
         "of an epoch that is over, the schedule does not hear its validation, and averages start anew"),
    # A signal kills a run of fairseq. Last of all, so that these wrap saving and updates as the others left them.
    Hook(RUN, "fairseq.checkpoint_utils:load_checkpoint", "(cfg, trainer, **passthrough_args)",
         "reliability.signals.preemption:listen_from_here",
         "signals are heard from here on: called by training alone, once, before the first update"),
    Hook(RUN, "fairseq.trainer:Trainer._aggregate_logging_outputs", _AGGREGATE,
         "reliability.signals.preemption:share_signals",
         "numbers of all processes are summed in each update: one more makes them agree when to stop"),
    Hook(RUN, "fairseq.trainer:Trainer.cumulative_training_time", "(self)",
         "reliability.signals.preemption:save_after_update",
         "asked for after each update has been logged, before validation: the place to save at"),
    Hook(RUN, "fairseq.trainer:Trainer.state_dict", "(self)",
         "reliability.signals.preemption:no_saving_meanwhile", "it asks for the time, too"),
    Hook(RUN, "fairseq.trainer:Trainer.valid_step", "(self, sample, raise_oom=False)",
         "reliability.signals.preemption:save_after_validation_batch",
         "validation may be long: a signal saves after the batch under way"),
    Hook(RUN, "fairseq.trainer:Trainer.train_step", _TRAIN_STEP,
         "reliability.signals.preemption:end_before_update", "a run that has saved ends before its next update"),
    Hook(RUN, "torch.utils.data._utils.signal_handling:_set_worker_signal_handlers", None,
         "reliability.signals.preemption:leave_signals_to_the_run",
         "a data worker that dies of a signal ends the run before it has saved"),
    Hook(COMMAND_LINE, "sys:excepthook", None,
         "reliability.command_line:printing_user_errors", "a user's mistake, and Ctrl-C, are a line and no traceback"),
    Hook(COMMAND_LINE, "warnings:filters", None,
         "reliability.command_line:without_warnings_nobody_can_act_on",
         "hydra and torch are called in ways that they deprecate: each run would start with a page of warnings"),
)
# fmt: on
