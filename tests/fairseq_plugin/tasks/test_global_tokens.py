"""Fine-tuning with tokens that all others see: the task marks them; weights are those of `global=1`."""

from helpers import write_toy_glue

PATTERN = "'(s[window=2,global={}]fl)x2'"


def test_glue_goes_on_from_first_tokens_to_the_first_text(data_folder, fairseq_train, tmp_path):
    glue = write_toy_glue(tmp_path / "glue")
    shared = "--criterion glue --arch bert_tiny --batch-size 16 --max-update 2 --sublayer-pattern"
    cola = fairseq_train(
        glue / "CoLA",
        f"{shared} {PATTERN.format(1)}",
        tmp_path / "cola",
        task=f"glue --tokenizer-folder {data_folder / 'tokenizer'}",
    )
    scores = fairseq_train(
        glue / "STS-B",
        f"{shared} {PATTERN.format('given')} --finetune-from-model {tmp_path / 'cola' / 'checkpoint_last.pt'}",
        tmp_path / "sts-b",
        task="glue",
    )
    heads = {name for name in (*cola["model"], *scores["model"]) if name.startswith("classification_heads")}
    assert cola["model"].keys() - heads == scores["model"].keys() - heads
    # Few updates of a small rate: the projections of global tokens are the ones that were trained before.
    name = "encoder.sentence_encoder.sublayers.0.inner.choices.window.q_proj.weight"
    assert (cola["model"][name] - scores["model"][name]).abs().max() < 0.01
