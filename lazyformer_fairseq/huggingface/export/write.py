"""``lazyformer export --to huggingface``."""

from pathlib import Path
from typing import Any, Optional, Union

import torch
from safetensors.torch import save_file
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export.model_card import model_card
from lazyformer_fairseq.huggingface.export.source import Source, read_source
from lazyformer_fairseq.huggingface.tokenizer.export import write_tokenizer
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder

AUTO, BERT, CUSTOM = FORMS = ("auto", "bert", "custom")
WEIGHTS_FILE, CARD_FILE = "model.safetensors", "README.md"
CLOSE = 1e-6  # of numbers around 1, between two ways to compute the same in double precision


def export_to_huggingface(
    folder: Union[str, Path],
    out: Union[str, Path],
    checkpoint_file: Optional[str] = None,
    form: str = AUTO,
    head: Optional[str] = None,
) -> str:
    """Writes a folder that transformers loads, whole or not at all.

    Before it takes its name, the model is read back from it and compared with the checkpoint's.

    Args:
        folder: of checkpoints; see :func:`lazyformer_fairseq.fairseq_plugin.models.hub.load`.
        out: must not exist yet, or be empty.
        form: "bert" for a BERT of transformers, "custom" for a model with code of its own, "auto" for the first where
            it is possible.
        head: the classification head to take along; None for the only one.

    Returns:
        The form that was chosen.

    Raises:
        UserError: what :func:`read_source` raises; the model is no BERT; a kind that nobody has written for
            transformers; `out` exists.
    """
    refuse_filled_folder(out)
    source = read_source(folder, checkpoint_file, head)
    form = choose_form(source, form)
    with atomic_folder(Path(out)) as unfinished:
        model_class = write_bert(source, unfinished) if form == BERT else write_custom(source, unfinished)
        write_tokenizer(source.tokenizer, unfinished, source.cfg.max_positions, source.cfg.token_types > 0)
        (unfinished / CARD_FILE).write_text(model_card(source, form, Path(out).name), encoding="utf-8")
        check_same_outputs(source, model_class.from_pretrained(str(unfinished)))
    return form


def choose_form(source: Source, form: str) -> str:
    """ "bert" or "custom"."""
    if form == CUSTOM:
        return CUSTOM
    from lazyformer_fairseq.huggingface.export.bert import why_not_bert

    why = why_not_bert(source)
    if why and form == BERT:
        raise UserError(f"--as bert: this model is no BERT: {why}; --as custom takes it, with code of its own")
    return CUSTOM if why else BERT


def write_bert(source: Source, folder: Path) -> Any:
    """Config and weights of a BERT; returns its class."""
    import transformers

    from lazyformer_fairseq.huggingface.export.bert import bert_config, bert_weights

    config = bert_config(source)
    config.save_pretrained(folder)
    save_weights(bert_weights(source), folder)
    return getattr(transformers, config.architectures[0])


def write_custom(source: Source, folder: Path) -> Any:
    """Config, weights and code; returns the class of the package that reads them."""
    from lazyformer_fairseq.huggingface.export.custom import custom_config, custom_weights, hash_custom
    from lazyformer_fairseq.huggingface.export.merge import merged_code
    from lazyformer_fairseq.huggingface.exported import heads, modelling

    config, weights = custom_config(source), custom_weights(source)
    code = merged_code(config.plan)
    config.weights_sha256 = hash_custom(config, weights)
    config.save_pretrained(folder)
    (folder / modelling.CODE_FILE).write_text(code, encoding="utf-8")
    save_weights(weights, folder)
    return getattr(heads, config.architectures[0])


def save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    save_file(weights, str(folder / WEIGHTS_FILE), {"format": "pt"})


@torch.no_grad()
def check_same_outputs(source: Source, model: Any) -> None:
    """Raises a UserError where the exported model computes something else than the checkpoint's, on padded texts.

    Both are in double precision from then on: in single precision deep models amplify rounding as far as small mistakes
    reach.
    """
    source.model.double().encoder.sentence_encoder.attention_backend = "eager"
    model = model.double()
    ids, marked = example(source)
    given = {} if marked is None else {"global_attention_mask": marked.long()}
    types = None
    if source.cfg.token_types:
        given["token_type_ids"] = types = torch.arange(ids.size(1)).expand_as(ids) % source.cfg.token_types
    pad = source.tokenizer.dictionary.pad()
    found = _logits(model(ids, attention_mask=ids.ne(pad).long(), **given))
    for name, logits in found.items():
        head = {"masked words": None, "next sentence": NEXT_SENTENCE}.get(name, source.head and source.head.name)
        wanted, _ = source.model(ids, classification_head_name=head, global_positions=marked, token_types=types)
        if wanted.dim() == 3:  # of each token
            logits, wanted = logits[ids.ne(pad)], wanted[ids.ne(pad)]
        difference = float((logits - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not difference < CLOSE:
            raise UserError(
                f"the exported model's logits of the {name} differ from the checkpoint's by {difference:.1g}: not "
                "written"
            )


def _logits(output: Any) -> dict[str, Tensor]:
    """What a model of transformers returned, by what it is of, in our order of numbers."""
    if "prediction_logits" in output:
        return {"masked words": output.prediction_logits, "next sentence": output.seq_relationship_logits}
    if "start_logits" in output:
        return {"head": torch.stack([output.start_logits, output.end_logits], -1)}
    return {"masked words" if output.logits.dim() == 3 else "head": output.logits}


def example(source: Source) -> tuple[Tensor, Optional[Tensor]]:
    """Ids (2, T), the second row padded on the right, and which tokens are marked, where the pattern asks for it."""
    dictionary, time = source.tokenizer.dictionary, min(24, source.cfg.max_positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(dictionary), (2, time), generator=generator)
    ids[ids == dictionary.pad()] = dictionary.unk()
    ids[:, 0] = dictionary.bos()
    ids[1, time * 2 // 3 :] = dictionary.pad()
    asks = any(planned.values.get("global") == "given" for planned in source.model.encoder.sentence_encoder.plan)
    return ids, torch.zeros_like(ids, dtype=torch.bool).index_fill(1, torch.tensor([0]), True) if asks else None
