"""Old names of commands and options: today's words, or a refusal that says what to do."""

import click
import pytest
from click.testing import CliRunner
from helpers import ROOT

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.old_names import OLD_NAMES, Gone, with_new_names


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("finetune-squad a b c", "finetune --task squad a b c"),
        ("glue run --checkpoint a=b --task-epochs RTE=3", "finetune --task glue --checkpoint a=b --epochs RTE=3"),
        ("squad prepare --data d --prepared e", "finetune --task squad --data d --data e"),
        ("glue predict --output grid --to=new --tasks CoLA", "predict grid --output new --tasks CoLA"),
        ("squad predict --checkpoint a.pt --to b --file c", "predict a.pt --output b --data c"),
        ("glue predict --tasks CoLA RTE --output grid", "predict grid --tasks CoLA RTE"),
        ("search data --from=x out", "search compress x data out"),
        ("compare a b --rates 1e-3 --shares=1,0.7", "compare a b --lr 1e-3 --time-fractions 1,0.7"),
        ("demo --minutes 2", "demo --budget 2min"),
        ("lm train a b --rows-per-update 8 --fp16", "pretrain a b --sequences-per-update 8 --precision fp16"),
        ("bench kinds --minutes 2 --rounds 3", "bench kinds --budget 2min --rounds 3"),
        ("plan --batch 8 --lazy-backend flex", "plan --sequences-per-update 8 --attention-backend flex"),
    ],
)
def test_our_own_old_words_and_a_notice_of_todays(old, now, capsys):
    assert with_new_names(old.split()) == now.split()
    assert " now\n" in capsys.readouterr().err
    found = CliRunner().invoke(main, ["tasks", "--help"])
    assert found.exit_code == 0 and found.stderr == "tasks: is diagnostics now\n" and "listops" in found.stdout


@pytest.mark.parametrize("key", [key for key, now in OLD_NAMES.items() if isinstance(now, Gone)])
def test_what_went_is_refused_in_words(key):
    with pytest.raises(UserError) as refusal:
        CliRunner().invoke(main, [*key.split(), "some", "words"], catch_exceptions=False)
    said = str(refusal.value)
    assert said.startswith(key.split()[-1] if "--" in key else key) and len(said) > len(key) + 10


def options_of(words: list[str]) -> set[str]:
    """Of the command that a line of `words` calls."""
    command: click.Command = main
    while isinstance(command, click.Group):
        is_named = bool(words) and words[0] in command.commands
        command = command.commands[words[0] if is_named else command.default]
        words = words[is_named:]
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    return (
        known | {"--save-dir"} if command.context_settings.get("ignore_unknown_options") else known
    )  # fairseq-train's


@pytest.mark.parametrize("line", (ROOT / "tests" / "fixtures" / "commands_of_2026_11.txt").read_text().splitlines())
def test_every_command_and_option_of_2026_11_is_known_renamed_or_refused(line):
    command, _, options = line.partition(": ")
    for old in options.split():
        try:
            now = with_new_names([*command.split(), old, "7"])
        except UserError:
            continue
        assert {word for word in now if word.startswith("--")} <= options_of(now), (line, now)
