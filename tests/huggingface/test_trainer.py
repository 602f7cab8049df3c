"""transformers' Trainer fine-tunes what was exported as our task fine-tunes the checkpoint."""

import pytest
import torch
from helpers import ROOT, write_toy_glue
from transformers import Trainer, TrainingArguments

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.finetuning.texts import GlueConfig, GlueCriterion, GlueTask
from lazyformer_fairseq.huggingface.export import export_to_huggingface
from lazyformer_fairseq.huggingface.exported import heads

CHECKPOINTS = ROOT / "tests/fixtures/checkpoints_of_2026_11/fine_tuned"
UPDATES, BATCH = 50, 8
ADAM = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}


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
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for batch in batches:
        loss, examples, _ = criterion(model, batch)
        losses.append(float(loss.detach()) / examples)
        optimizer.zero_grad()
        (loss / examples).backward()
        optimizer.step()
    return losses


def test_losses_of_fifty_updates_are_equal_on_equal_batches(task, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    export_to_huggingface(CHECKPOINTS, tmp_path / "exported")
    model = heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path / "exported")
    dataset, pad = task.datasets["train"], task.dictionary.pad()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(3)).repeat(10).split(BATCH)
    batches = [dataset.collater([dataset[int(index)] for index in indices]) for indices in order[:UPDATES]]
    given = [(batch["net_input"]["src_tokens"], batch["target"]) for batch in batches]
    given = [{"input_ids": ids, "attention_mask": ids.ne(pad).long(), "labels": labels} for ids, labels in given]
    arguments = TrainingArguments(
        str(tmp_path / "trained"), max_steps=UPDATES, max_grad_norm=0, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_steps=1, logging_nan_inf_filter=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    optimizers = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    trainer = Trainer(model, arguments, train_dataset=given, optimizers=optimizers)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(given, batch_size=None)  # in order
    trainer.train()
    wanted = our_losses(task, batches)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == UPDATES
    assert wanted[-1] != pytest.approx(wanted[0], abs=0.01), "it learns something"
    assert losses == pytest.approx(wanted, abs=1e-4)  # the log rounds them to half of that
    trainer.save_model(str(tmp_path / "saved"))
    heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path / "saved")
