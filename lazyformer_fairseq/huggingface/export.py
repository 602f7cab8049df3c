"""``lazyformer export --to huggingface``: a folder that transformers loads, as a model of ours or as a real BERT.

A plain ``(sf)xN`` becomes a BERT of transformers, without code of its own, and what is a ModernBERT one of these. BERT
counts positions from the left, padding included, and sees all tokens without an attention mask: so the two agree on
inputs that are padded on the right and have one. The model's `dense` classification head is BERT's pooler and
classifier, its head for next sentences BERT's pooler and ``cls.seq_relationship``, its span head ``qa_outputs``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.evaluation.match import dictionary_hash, heads_in_checkpoint
from lazyformer_fairseq.huggingface.forms import (
    BERT,
    CAUSAL,
    CUSTOM,
    MODERN,
    Head,
    Source,
    causal_options,
    why_not_bert,
    why_not_modernbert,
    write_bert,
    write_causal,
    write_custom,
    write_modernbert,
)
from lazyformer_fairseq.huggingface.tokenizer import write_causal_tokenizer, write_tokenizer
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, SPAN
from lazyformer_fairseq.patterns.kinds import RMS
from lazyformer_fairseq.storage.atomic import atomic_folder

AUTO = "auto"
NAMES = {BERT: "BERT", MODERN: "ModernBERT"}  # of those that transformers has
CARD_FILE = "README.md"
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
        folder: of checkpoints; see :func:`lazyformer_fairseq.evaluation.loading.load`.
        out: must not exist yet, or be empty.
        form: "bert" or "modernbert" for one of transformers, "custom" for a model with code of its own, "auto" for the
            first that is possible.
        head: the classification or span head to take along; None for the only one, if there is one.

    Returns:
        The form that was chosen.

    Raises:
        UserError: what `load` raises; no such head, or several; the model is no BERT; a kind whose
            code cannot be exported; `out` exists.
    """
    path = checkpoint_at(Path(folder), checkpoint_file)
    state = checkpoints.load(path)
    if loading.is_causal(state):
        if form in (BERT, MODERN) or head is not None:
            raise UserError(f"{path}: is a causal language model: leave --as and --head out")
        with atomic_folder(Path(out)) as unfinished:
            write_causal(state, path, unfinished)
            dictionary = dictionary_of_causal(state, path)
            has_tokenizer = dictionary is not None and write_causal_tokenizer(dictionary, unfinished)
            card = causal_card(state, Path(out).name, has_tokenizer)
            (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        return CAUSAL
    loaded = loading.load_state(state, path, loading.tokenizer_beside(path))
    chosen = choose_head(state["model"], head, path, loaded.tasks)
    if chosen is not None:
        loaded.fold_unit(chosen.name)
    source = Source(loaded.model, loaded.tokenizer, chosen, training_of(state))
    form = choose_form(source, form)
    with atomic_folder(Path(out)) as unfinished:
        write = {BERT: write_bert, MODERN: write_modernbert, CUSTOM: write_custom}[form]
        model_class = write(source, unfinished)
        write_tokenizer(source.tokenizer, unfinished, source.cfg.max_positions, source.cfg.token_types > 0)
        if form == CUSTOM:
            source.tokenizer.save(unfinished / "tokenizer")  # for `lazyformer import`
        card = model_card(source, form, Path(out).name)
        (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        check_same_outputs(source, model_class.from_pretrained(str(unfinished)))
    return form


def dictionary_of_causal(state: Mapping[str, Any], path: Path) -> Optional[Dictionary]:
    """Return the dictionary of a causal language model: that beside its checkpoint, else that of its training data.

    Args:
        state: of the checkpoint.
        path: of its file.

    Returns:
        None where neither is there, or where what is there is another one than the checkpoint's.

    Raises:
        UserError: the file that is there is no dictionary.
    """
    data = str((state["cfg"].get("task") or {}).get("data") or "").split(":")[0]
    places = [path.parent, path.parent / "data", *([Path(data)] if data else [])]
    for file in (place / "dict.txt" for place in places):
        if file.is_file():
            dictionary = load_dictionary(file)
            if torch.equal(dictionary_hash(dictionary), state["model"]["dictionary_sha256"]):
                return dictionary
    return None


def choose_head(
    weights: Mapping[str, Any],
    name: Optional[str],
    path: Path,
    tasks: Mapping[str, TaskDescription],
) -> Optional[Head]:
    """The classification or span head of this name, or the only one; that of pre-training must be named.

    Args:
        tasks: what heads were trained on.
    """
    there = heads_in_checkpoint(dict(weights))
    fine_tuned = [head for head in there if head != NEXT_SENTENCE]
    if name is None and len(fine_tuned) > 1:
        raise UserError(
            f"{path}: has classification heads {', '.join(there)}, the folder gets one: choose it by --head"
        )
    if name is not None and name not in there:
        known = ", ".join(there) or "none"
        raise UserError(f"{path}: has no classification head {name!r}, but {known}{nearest(name, there)}")
    chosen = name or next(iter(fine_tuned), None)
    if chosen is None:
        return None
    outputs, kind = there[chosen]
    return Head(chosen, outputs, kind, tasks[chosen].labels if chosen in tasks else ())


def choose_form(source: Source, form: str) -> str:
    """Any but "auto"."""
    why_not = {BERT: why_not_bert, MODERN: why_not_modernbert}
    if form == AUTO:
        return next((plain for plain, why in why_not.items() if not why(source)), CUSTOM)
    if form in why_not and (why := why_not[form](source)):
        raise UserError(
            f"--as {form}: this model is no {NAMES[form]}: {why}; --as custom takes it, with code of its own"
        )
    return form


# The comparison


@torch.no_grad()
def check_same_outputs(source: Source, model: Any) -> None:
    """Raises a UserError where the exported model computes something else than the checkpoint's, on padded texts.

    Both are in double precision from then on: in single precision deep models amplify rounding as far as small mistakes
    reach.
    """
    source.model.double().encoder.sentence_encoder.attention_backend = "eager"
    model = model.double()
    ids, marked = example(source)
    if marked is None:
        given = {}
    else:
        given = {"global_attention_mask": marked.long()}
    types = None
    if source.cfg.token_types:
        given["token_type_ids"] = types = torch.arange(ids.size(1)).expand_as(ids) % source.cfg.token_types
    is_text = ids.ne(source.tokenizer.dictionary.pad())
    for name, logits in _logits(model(ids, attention_mask=is_text.long(), **given)).items():
        if source.head is None:
            of_task = NEXT_SENTENCE
        else:
            of_task = source.head.name
        of_name = {"masked words": (False, None), "features": (True, None), "next sentence": (False, NEXT_SENTENCE)}
        features_only, head = of_name.get(name, (False, of_task))
        asked = {"features_only": features_only, "classification_head_name": head}
        wanted, _ = source.model(ids, global_positions=marked, token_types=types, **asked)
        if wanted.dim() == 3:  # of each token
            logits = logits[is_text]
            wanted = wanted[is_text]
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
    if "last_hidden_state" in output:
        return {"features": output.last_hidden_state}
    if "start_logits" in output:
        return {"head": torch.stack([output.start_logits, output.end_logits], -1)}
    return {"masked words" if output.logits.dim() == 3 else "head": output.logits}


def example(source: Source) -> tuple[Tensor, Optional[Tensor]]:
    """Ids (2, T), the second row padded on the right, and which tokens are marked, where the pattern asks for it."""
    dictionary = source.tokenizer.dictionary
    time = min(24, source.cfg.max_positions)
    ids = torch.randint(len(dictionary), (2, time), generator=torch.Generator().manual_seed(0))
    ids[ids == dictionary.pad()] = dictionary.unk()
    ids[:, 0] = dictionary.bos()
    ids[1, time * 2 // 3 :] = dictionary.pad()
    asks = any(planned.values.get("global") == "given" for planned in source.model.encoder.sentence_encoder.plan)
    return ids, torch.zeros_like(ids, dtype=torch.bool).index_fill(1, torch.tensor([0]), True) if asks else None


# The card

UNKNOWN = "unknown: the checkpoint does not say"
CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- lazyformer
- lazyformer_fairseq{tag}
---

# {name}

{kind} that lazyformer_fairseq trained, with the sublayer pattern `{pattern}`.

| | |
|---|---|
{rows}

## Load it

```python
{imports}

{tokenizer}model = {auto}.from_pretrained("{name}"{trust})
```

{code}

## Licence

Whoever publishes this model chooses its licence, and writes it here and in the header (`license:`). The data
it was trained on may bind them.
"""
TOKENIZER = 'tokenizer = {loader}.from_pretrained("{name}")\n'
NEEDS_PACKAGE = """\
It needs lazyformer_fairseq: there is no code in this folder. {tokenizer} `model.generate` remembers the whole text, in
training it was the last {mem_len} tokens before each segment."""
OF_DATA = "The tokenizer cuts a text as the training data were cut; what it does not know becomes `<unk>`."
NO_TOKENIZER = """\
There is no tokenizer: ids are those of the data's `dict.txt`, whose first word has the id 4, behind `<s>`, `<pad>`,
`</s>` and `<unk>`."""
PLAIN = """\
It is a plain {kind}: transformers loads it without code of its own. Pad on the right, and pass an
attention mask, as the tokenizer does."""
OWN_CODE = """\
The files `*.py` are all its code; they need torch, numpy and transformers. Where lazyformer_fairseq is
installed, `import lazyformer_fairseq.huggingface` first, and leave `trust_remote_code` out."""


def model_card(source: Source, form: str, name: str) -> str:
    """README.md of the folder `name`, in Markdown with the header that the Hub reads; the licence is left out.

    Args:
        source: the checkpoint.
        form: of the folder.
    """
    has_code = form == CUSTOM
    if has_code:
        trust = ", trust_remote_code=True"
    else:
        trust = ""
    auto = f"AutoModel{source.use.ending}"
    # AutoTokenizer reads config.json first, and asks whether to run the code that it names. The tokenizer needs none.
    if has_code:
        loader = "PreTrainedTokenizerFast"
    else:
        loader = "AutoTokenizer"
    return CARD.format(
        kind="An encoder",
        imports=f"from transformers import {', '.join(sorted([auto, loader]))}",
        tokenizer=TOKENIZER.format(name=name, loader=loader),
        pipeline=source.use.pipeline,
        tag="" if has_code else f"\n- {form}",
        name=name,
        pattern=source.cfg.sublayer_pattern,
        rows=_table(_rows(source)),
        auto=auto,
        trust=trust,
        code=OWN_CODE if has_code else PLAIN.format(kind=NAMES[form]),
    )


def causal_card(state: Mapping[str, Any], name: str, has_tokenizer: bool) -> str:
    """Return the same of a causal language model."""
    options = causal_options(state)
    weights = state["model"]
    parameters = sum(weight.numel() for part, weight in weights.items() if part != "dictionary_sha256")
    rows = {"parameters": f"{parameters:,}", "vocabulary": f"{weights['softmax.bias'].size(0):,} symbols"}
    return CARD.format(
        pipeline="text-generation",
        tag="",
        kind="A causal language model",
        name=name,
        pattern=options.sublayer_pattern,
        rows=_table({**rows, **training_of(state)}),
        imports="import lazyformer_fairseq.huggingface\nfrom transformers import "
        + ("AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"),
        tokenizer=TOKENIZER.format(name=name, loader="AutoTokenizer") if has_tokenizer else "",
        auto="AutoModelForCausalLM",
        trust="",
        code=NEEDS_PACKAGE.format(mem_len=options.mem_len, tokenizer=OF_DATA if has_tokenizer else NO_TOKENIZER),
    )


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(f"| {title} | {value} |" for title, value in rows.items())


def _rows(source: Source) -> dict[str, str]:
    cfg = source.cfg
    head = source.head
    buckets = cfg.relative_position_buckets
    distance = cfg.relative_position_max_distance
    named = source.model.named_parameters()
    parameters = sum(weight.numel() for name, weight in named if not name.startswith("classification_heads."))
    if str(cfg.norm) == RMS:
        norm = "RMSNorm"
    else:
        norm = "LayerNorm"
    without = [of for of in ("linear", "norm") if getattr(cfg, f"no_{of}_bias")]
    if without:
        biases = f", without {' and '.join(without)} biases"
    else:
        biases = ""
    if cfg.encoder_normalize_before:
        place = "pre"
    else:
        place = "post"
    rows = {
        "sublayers": f"`{cfg.sublayer_pattern}`, {place}-norm, {norm}{biases}",
        "parameters": f"{parameters:,}, without classification heads",
        "width, feed-forward, heads": f"{cfg.encoder_embed_dim}, {cfg.encoder_ffn_embed_dim}, "
        f"{cfg.encoder_attention_heads}",
        "positions": f"{cfg.max_positions}{', none learned' * cfg.no_token_positional_embeddings}",
        "relative position bias": f"{buckets} buckets up to {distance} tokens (T5)" if buckets else "none",
        "vocabulary": f"{len(source.tokenizer.dictionary):,} symbols",
        **source.training,
    }
    if not source.has_lm_head:
        rows["masked-LM head"] = "none: the checkpoint's never trained, so that it cannot fill masks"
    if head is not None and head.kind == SPAN:
        rows["span head"] = f"{head.name}: where an answer starts, and where it ends"
    elif head is not None:
        labels = ", ".join(head.labels) or ("a score" if head.outputs == 1 else "without names")
        rows["classification head"] = f"{head.name}: {labels}"
    return rows


def training_of(state: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint's settings and meters know of its training, in words: data (without where it is), task,
    updates of each run, means of the last validation."""
    extra = state.get("extra_state") or {}
    task = (state.get("cfg") or {}).get("task") or {}
    folders = [Path(folder).name for folder in str(task.get("data") or "").split(":") if folder]
    runs = [int(run.get("num_updates", 0)) for run in state.get("optimizer_history") or ()]
    meters = dict(extra.get("metrics") or {}).get("valid") or ()
    losses = [
        f"{name} {float(meter['sum']) / float(meter['count']):.4g}"
        for _, name, kind, meter in meters
        if kind == "AverageMeter" and name not in ("wpb", "bsz") and meter.get("count")
    ]
    return {
        "trained on": ", ".join(f"`{folder}`" for folder in folders) or UNKNOWN,
        "task": f"`{task['_name']}`" if task.get("_name") else UNKNOWN,
        "updates": " and then ".join(f"{updates:,}" for updates in runs if updates) or UNKNOWN,
        "last validation": ", ".join(losses) or UNKNOWN,
    }
