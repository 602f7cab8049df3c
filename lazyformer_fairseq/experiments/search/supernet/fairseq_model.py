"""Task, model, data and loss of a search, as fairseq-train would build them."""

import difflib
from typing import Any, NoReturn

from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from fairseq.tasks import setup_task
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet.data_parts import Part, two_parts_of_blocks, two_parts_of_text
from lazyformer_fairseq.experiments.search.supernet.mixture import Choices, Supernet, supernet_pattern
from lazyformer_fairseq.modules.networks.stack import Stack

# Task, criterion, and the model whose architectures fit them.
TASKS = {
    "masked-lm": ("full_sentences_masked_lm", "masked_lm_accuracy", "lazyformer"),
    "language-model": ("stream_language_modeling", "causal_lm", "lazyformer_lm"),
}
OURS = ("--sublayer-pattern", "--arch", "--task", "--criterion", "--seed", "--batch-size", "--save-dir")


def parse(data: str, task: str, arch: str, seed: int, fairseq_options: tuple[str, ...]) -> Any:
    """fairseq's config.

    Raises:
        UserError: the arch does not fit the task, or fairseq rejects an option or its value.
    """
    for option in fairseq_options:
        if option.split("=")[0] in OURS:
            raise UserError(f"{option}: the search sets it itself (see lazyformer search --help)")
    name, criterion, model = TASKS[task]
    _check_arch(arch, task, ARCH_MODEL_INV_REGISTRY[model])
    parser = options.get_training_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(
            f"{message}; options that lazyformer search does not have itself go to fairseq's task and model"
        )

    parser.error = refuse
    command = [data, "--task", name, "--criterion", criterion, "--arch", arch, "--seed", str(seed), "--no-save"]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [*command, *fairseq_options]))


def _check_arch(arch: str, task: str, fitting: list[str]) -> None:
    """Raises a UserError that lists fitting archs, the most similar ones first."""
    if arch in fitting:
        return
    close = difflib.get_close_matches(arch, fitting)
    others = [name for name in fitting if name not in close and not name.endswith("_tiny")]
    raise UserError(
        f"--arch {arch}: no architecture for --task {task}; choose from {', '.join([*close, *others])}, or the tiny "
        "twin of one"
    )


class FairseqSearch:
    """What a search builds from fairseq's registries; raises a UserError as the task and :func:`parse` do."""

    def __init__(self, settings: SearchSettings):
        self.settings = settings
        self.cfg = parse(settings.data, settings.task, settings.arch, settings.seed, settings.fairseq_options)
        self.task = setup_task(self.cfg.task)
        self.criterion = self.task.build_criterion(self.cfg.criterion)

    def build_model(self, pattern: str) -> tuple[nn.Module, Stack]:
        """A fresh seeded model of any pattern, on the search's device, and its stack."""
        utils.set_torch_seed(self.settings.seed)
        self.cfg.model.sublayer_pattern = pattern
        model = self.task.build_model(self.cfg.model).to(self.settings.device)
        return model, next(module for module in model.modules() if isinstance(module, Stack))

    def build_supernet(self, candidates: tuple[str, ...]) -> Supernet:
        """A supernet with as many layers as the baseline."""
        return self.build_supernet_and_network(candidates)[0]

    def build_supernet_and_network(self, candidates: tuple[str, ...]) -> tuple[Supernet, Stack]:
        """The same, and its stack."""
        layers = self.settings.layers
        model, network = self.build_model(supernet_pattern(candidates, layers))
        return Supernet(model, network, Choices(layers, candidates).to(self.settings.device)), network

    def loss_of(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Summed loss in nats and number of predictions."""
        loss, count, _ = self.criterion(model, batch)
        return loss, count

    def parts(self) -> tuple[Part, Part]:
        """The training data, for the weights and for the architecture; each call starts it anew.

        Raises:
            UserError: there is too little of it, or it does not fit the model.
        """
        self.task.load_dataset("train")
        dataset, settings = self.task.dataset("train"), self.settings
        if settings.task == "masked-lm":
            dataset.filter_indices_by_size(dataset.ordered_indices(), self.cfg.model.max_positions)
            return two_parts_of_blocks(dataset, settings.architecture_share, settings.batch_size)
        dictionary = self.task.dictionary
        return two_parts_of_text(
            dataset.tokens,
            settings.architecture_share,
            settings.batch_size,
            self.cfg.task.tgt_len,
            self.cfg.model.mem_len,
            dictionary.eos(),
            dictionary.pad(),
        )

    @property
    def training_lengths(self) -> tuple[int, int]:
        """T and M in training; M is 0 for encoders."""
        if self.settings.task == "masked-lm":
            return self.cfg.task.tokens_per_sample, 0
        return self.cfg.task.tgt_len, self.cfg.model.mem_len

    @property
    def predicted_share(self) -> float:
        """Of a sequence's tokens, in training."""
        return self.cfg.task.mask_prob if self.settings.task == "masked-lm" else 1.0

    @property
    def latency_tokens(self) -> int:
        """T for measuring latency: the setting, else the training's."""
        return self.settings.latency_tokens or self.training_lengths[0]

    @property
    def latency_memory(self) -> int:
        """M for measuring latency; 0 for encoders."""
        asked, memory = self.settings.latency_memory, self.training_lengths[1]
        return memory if asked is None or self.settings.task == "masked-lm" else asked
