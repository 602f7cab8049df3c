"""Commands in this process, without the seconds that another one takes to start."""

from click.testing import CliRunner
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError


def invoke(*words: object, code: int = 0) -> str:
    """What ``lazyformer`` prints; an error of the user's is raised."""
    done = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def refusal(*words: object) -> str:
    """What ``lazyformer`` says of a user's mistake, click's own words or ours."""
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 2 or isinstance(done.exception, UserError), (done.output, done.exception)
    return done.output if done.exit_code == 2 else str(done.exception)


def config_of(*words: object) -> DictConfig:
    """fairseq's configuration for a command line of fairseq-train."""
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(map(str, words))))
