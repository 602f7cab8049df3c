"""Trainings that take turns in one process."""

from helpers import ROOT, write_toy_glue

from lazyformer_fairseq.measure.stepwise import StepwiseTraining

SHARED = "--arch bert_tiny --batch-size 4 --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3 --cpu"


def command(data, options: str) -> list[str]:
    return [str(data), "--user-dir", str(ROOT / "lazyformer_fairseq"), *options.split(), *SHARED.split()]


def test_trainings_of_several_tasks_take_turns(data_folder, tmp_path):
    """fairseq keeps meters by name for the whole process, and these two log other kinds of `accuracy`."""
    glue = write_toy_glue(tmp_path / "glue", train=16, valid=4)
    pretraining = "--task full_sentences_masked_lm --tokens-per-sample 32 --criterion masked_lm_accuracy"
    finetuning = f"--task glue --criterion glue --tokenizer-folder {data_folder / 'tokenizer'} --max-update 9"
    trainings = [
        StepwiseTraining(command(glue / "CoLA", finetuning), tmp_path / "finetuning"),
        StepwiseTraining(command(data_folder, f"{pretraining} --max-update 9"), tmp_path / "pretraining"),
    ]
    measures = []
    for _ in range(2):
        for training in trainings:
            assert training.update() > 0
            measures.append(training.evaluate())
    assert [training.updates for training in trainings] == [2, 2]
    assert ["ppl" in found for found in measures] == [False, True] * 2
    assert all("accuracy" in found for found in measures)
