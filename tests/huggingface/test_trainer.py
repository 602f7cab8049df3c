"""transformers' Trainer pre-trains and fine-tunes as fairseq does; its folders become checkpoints of ours."""

import math
from dataclasses import is_dataclass

import pytest
import torch
from helpers import ROOT, build_toy_corpus, train_here, write_toy_glue
from in_process import invoke, refusal
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from lazyformer_fairseq import LazyFormerConfig, LazyFormerForMaskedLM, LazyFormerModel, build, open_masked_text
from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.finetuning import GlueCriterion
from lazyformer_fairseq.fairseq_plugin.tasks.finetuning import GlueConfig, GlueTask
from lazyformer_fairseq.huggingface import MaskedTextCollator, ShardTrainer, tokenizer_for_transformers
from lazyformer_fairseq.huggingface.export import export_to_huggingface
from lazyformer_fairseq.huggingface.models import heads

CHECKPOINTS = ROOT / "tests/fixtures/checkpoints/fine_tuned"
UPDATES = 20
ADAM = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}


@pytest.fixture
def task(tmp_path):
    """CoLA in miniature, with the checkpoint's tokenizer."""
    data = write_toy_glue(tmp_path / "glue") / TASKS["CoLA"].folder
    cfg = GlueConfig(data=str(data), tokenizer_folder=str(CHECKPOINTS / "tokenizer"), tokens_per_sample=32)
    cfg.save_dir, cfg.no_save, cfg.seed = str(tmp_path / "run"), True, 1
    cfg.finetune_from_model, cfg.best_checkpoint_metric, cfg.valid_subset = None, "loss", "valid"
    cfg.maximize_best_checkpoint_metric = False
    task = GlueTask.setup_task(cfg)
    task.load_dataset("train")
    return task


def our_losses(task, batches) -> list[float]:
    """By our model and criterion."""
    model = LazyFormerModel.from_pretrained(CHECKPOINTS).model.train().requires_grad_(True)
    criterion = GlueCriterion(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **ADAM)
    losses = []
    for batch in batches:
        loss, examples, _ = criterion(model, batch)
        losses.append(float(loss.detach()) / examples)
        optimizer.zero_grad()
        (loss / examples).backward()
        optimizer.step()
    return losses


def test_losses_of_fine_tuning_are_equal_on_equal_batches(task, tmp_path):
    """transformers' Trainer fine-tunes an exported model as our criterion does the checkpoint."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    export_to_huggingface(CHECKPOINTS, tmp_path / "exported")
    model = heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path / "exported")
    dataset, pad = task.datasets["train"], task.dictionary.pad()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(3)).repeat(10).split(8)
    batches = [dataset.collater([dataset[int(index)] for index in indices]) for indices in order[:UPDATES]]
    given = [(batch["net_input"]["src_tokens"], batch["target"]) for batch in batches]
    given = [{"input_ids": ids, "attention_mask": ids.ne(pad).long(), "labels": labels} for ids, labels in given]
    arguments = TrainingArguments(
        str(tmp_path / "trained"), max_steps=UPDATES, max_grad_norm=0, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_steps=1, logging_nan_inf_filter=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **ADAM)
    optimizers = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    trainer = Trainer(model, arguments, train_dataset=given, optimizers=optimizers)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(given, batch_size=None)  # in order
    trainer.train()
    wanted = our_losses(task, batches)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == UPDATES
    assert wanted[-1] < 0.8 * wanted[0], "it learns something"
    assert losses == pytest.approx(wanted, abs=1e-4)  # the log rounds them to half of that
    trainer.save_model(str(tmp_path / "saved"))
    heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path / "saved")


# Pre-training: fairseq-train, Trainer and a plain loop

BATCH = 20
STEPS = 20  # two epochs, each of a shard
RATE = 5e-3
PATTERN = "M2"
SETTINGS = {
    "sublayer_pattern": PATTERN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 32,
}
FAIRSEQ = (
    "--task full_sentences_masked_lm --tokens-per-sample 32 --criterion masked_lm_accuracy --arch "
    "lazyformer_m2x6_s_tiny --dropout 0 --attention-dropout 0 --max-positions 32 --optimizer fused_adam --adam-betas "
    "(0.9,0.98) --adam-eps 1e-6 --weight-decay 0.01 --lr-scheduler linear_warmup --warmup-ratio 0 --cpu "
    f"--num-workers 0 --lr {RATE} --batch-size {BATCH} --seed 3 --max-update {STEPS} --disable-validation "
    f"--log-format none --sublayer-pattern {PATTERN}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two shards, one an epoch."""
    folder = tmp_path_factory.mktemp("text") / "data"
    build_toy_corpus(folder, vocab_size=160, shards=2)
    return open_masked_text(folder, seed=3, tokens_per_sample=32)


def fresh(text) -> LazyFormerForMaskedLM:
    torch.manual_seed(3)
    config = LazyFormerConfig.from_arch("lazyformer_m2x6_s_tiny", len(text.dictionary), **SETTINGS)
    return LazyFormerForMaskedLM(config).train()


def adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **ADAM)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: (STEPS - done) / STEPS)


class Noting(ShardTrainer):
    """Keeps the loss of each update."""

    def training_step(self, *given, **named):
        loss = super().training_step(*given, **named)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


def arguments_in(folder, **others) -> TrainingArguments:
    return TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, max_grad_norm=0, seed=3, use_cpu=True,
        report_to=[], disable_tqdm=True, remove_unused_columns=False, **others,
    )  # fmt: skip


def test_losses_of_fairseq_trainer_and_plain_loop_are_equal(text, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    criterions = pytest.importorskip("lazyformer_fairseq.fairseq_plugin.criterions.language_modeling")
    of_fairseq, forward = [], criterions.MaskedLMAccuracyCriterion.forward

    def noted(self, model, sample, reduce=True):
        loss, size, logged = forward(self, model, sample, reduce)
        of_fairseq.append(float(loss.detach()) / size)
        return loss, size, logged

    monkeypatch.setattr(criterions.MaskedLMAccuracyCriterion, "forward", noted)
    train_here(text.data, "--user-dir", ROOT / "lazyformer_fairseq", "--save-dir", tmp_path / "run", *FAIRSEQ.split())
    assert len(of_fairseq) == STEPS
    assert of_fairseq[-1] < of_fairseq[0] - 0.3, "it learns"

    torch.manual_seed(3)
    sizes = {"sublayer_pattern": PATTERN, "dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}
    model, of_loop = build("lazyformer_m2x6_s_tiny", len(text.dictionary), text.special.pad, **sizes), []
    optimizer, schedule = adamw(model)
    batches = EpochBatches(text.split("train"), BATCH, seed=3)
    for batch in (batch for _ in range(2) for batch in batches):
        masked = batch["masked_positions"]
        logits, _ = model(batch["net_input"]["src_tokens"], masked_tokens=masked)
        loss = torch.nn.functional.cross_entropy(logits, batch["target"].flatten()[masked])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        of_loop.append(float(loss.detach()))
    assert of_loop == pytest.approx(of_fairseq, abs=1e-5)

    collator = MaskedTextCollator(text)
    model, saving = fresh(text), arguments_in(tmp_path / "trainer", save_steps=12)
    trainer = Noting(model, saving, collator, text.split("train"), text.split("valid"), optimizers=adamw(model))
    trainer.train()
    assert trainer.losses == pytest.approx(of_fairseq, abs=1e-5)
    resumed = Noting(again := fresh(text), saving, collator, text.split("train"), optimizers=adamw(again))
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-12"))
    assert resumed.losses == trainer.losses[12:], "a second epoch's batches and masks, from where it stopped"
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(of_fairseq[-1], abs=0.5)
    assert found["eval_bits"] == pytest.approx(found["eval_loss"] / math.log(2))
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert trainer.state.log_history[-1]["eval_bits"] == found["eval_bits"], "the log has it too"

    ours = LazyFormerModel.from_pretrained(tmp_path / "run").model.state_dict()
    trainer.save_model(str(tmp_path / "saved"))
    assert "with --tokenizer, pass the tokenizer folder" in refusal("import", tmp_path / "saved", tmp_path / "no")
    invoke("import", tmp_path / "saved", tmp_path / "imported", "--tokenizer", f"{text.data}/tokenizer")
    imported = LazyFormerModel.from_pretrained(tmp_path / "imported").model.state_dict()
    assert imported.keys() == ours.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(imported[name], weight, atol=1e-4, rtol=0)
    invoke("export", tmp_path / "imported", tmp_path / "back", "--to", "huggingface")
    again = LazyFormerForMaskedLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in trainer.model.state_dict().items())
    invoke("import", tmp_path / "back", tmp_path / "once_more")
    once_more = LazyFormerModel.from_pretrained(tmp_path / "once_more").model.state_dict()
    assert all(torch.equal(weight, once_more[name]) for name, weight in imported.items())


@pytest.mark.parametrize("name", ["encoder", "fine_tuned"])
def test_a_checkpoint_is_the_same_to_the_bit_when_it_comes_back(name, tmp_path):
    folder = ROOT / "tests/fixtures/checkpoints" / name
    invoke("export", folder, tmp_path / "out", "--to", "huggingface")
    invoke("import", tmp_path / "out", tmp_path / "back", *(["--head-name", "cola"] if name == "fine_tuned" else []))
    before, after = (LazyFormerModel.from_pretrained(each).model for each in (folder, tmp_path / "back"))
    assert before.state_dict().keys() == after.state_dict().keys()
    assert all(torch.equal(weight, after.state_dict()[each]) for each, weight in before.state_dict().items())
    one, other = (vars(each.cfg) if is_dataclass(each.cfg) else dict(each.cfg) for each in (before, after))
    assert {name for name in one.keys() & other.keys() if one[name] != other[name]} <= {"attention_backend", "_name"}


def test_stock_trainer_reads_our_samples_and_its_own_collator_our_tokenizer(text, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    train, seen = text.split("train"), []
    collator = MaskedTextCollator(text)

    def noted(samples):
        seen.append({int(sample["id"]): sample["source"] for sample in samples})
        return collator(samples)

    arguments = arguments_in(tmp_path, save_strategy="no")
    arguments.max_steps, arguments.num_train_epochs = -1, 3
    Trainer(fresh(text), arguments, noted, train_dataset=train).train()
    of_shard = -(-len(text.dataset("train")) // BATCH)
    first, third = seen[0], seen[-of_shard:]
    assert any(
        not torch.equal(batch[index], source)
        for index, source in first.items()
        for batch in third
        if index in batch and batch[index].shape == source.shape
    ), "other masks in each epoch"
    arguments.remove_unused_columns = True
    with pytest.raises(UserError, match="remove_unused_columns=False"):
        Trainer(fresh(text), arguments, collator, train_dataset=train).train()
    tokenizer = tokenizer_for_transformers(text.tokenizer, 32)
    sentences = ["anna sees ben near the house.", "the old house"]
    rows = [{"input_ids": ids} for ids in tokenizer(sentences, truncation=True)["input_ids"]]
    assert 0 < loss_on(rows, tokenizer, text, tmp_path) < 2 * math.log(len(text.dictionary))


def loss_on(rows, tokenizer, text, folder) -> float:
    masked = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    trainer = Trainer(fresh(text), arguments_in(folder, save_strategy="no"), masked, train_dataset=rows)
    trainer.args.max_steps, trainer.args.remove_unused_columns = 2, True
    return trainer.train().training_loss


def test_rows_of_the_package_datasets_train(text, tmp_path):
    datasets = pytest.importorskip("datasets", reason="optional, in no extra")
    tokenizer = tokenizer_for_transformers(text.tokenizer, 32)
    (tmp_path / "lines.txt").write_text("anna sees ben near the house.\nthe old house\n" * 8)
    rows = datasets.load_dataset(
        "text", data_files=f"{tmp_path}/*.txt", split="train", cache_dir=str(tmp_path / "cache")
    )
    encode = lambda row: tokenizer(row["text"], truncation=True)  # noqa: E731
    rows = rows.map(encode, batched=True, remove_columns="text")
    assert 0 < loss_on(rows, tokenizer, text, tmp_path / "out") < 2 * math.log(len(text.dictionary))


@pytest.mark.parametrize("options", [{"next_sentence": True}, {"mask_prob": "0.3:0.15"}, {"length_schedule": "8:0.5"}])
def test_text_that_trainer_cannot_train_on_is_refused(options, text):
    with pytest.raises(UserError, match="not supported by transformers' Trainer"):
        MaskedTextCollator(open_masked_text(text.data, max_update=9, **options))


def test_gradient_accumulation_weighs_batches_by_their_masks_and_documents_are_apart(text, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    apart = open_masked_text(text.data, seed=3, tokens_per_sample=32, within_documents=True)
    collator, train = MaskedTextCollator(apart), apart.split("train")
    batches = [collator.inputs(batch) for batch, _ in zip(EpochBatches(train, BATCH, seed=3), range(2), strict=False)]
    assert "documents" in batches[0]
    model = fresh(text)
    counts = [int(batch["labels"].ne(-100).sum()) for batch in batches]
    losses = [float(model(**batch).loss.detach()) for batch in batches]
    trainer = Noting(
        model, arguments_in(tmp_path, save_strategy="no", gradient_accumulation_steps=2), collator, train,
        optimizers=adamw(model),
    )  # fmt: skip
    trainer.args.max_steps = 1
    trainer.train()
    assert sum(trainer.losses) == pytest.approx(
        sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts), abs=1e-5
    )
