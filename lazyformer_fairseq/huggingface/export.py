"""``lazyformer export --to huggingface``: exports a model to a folder that transformers loads, as ours or as a BERT.

A model with the plain pattern ``(sf)xN`` becomes transformers' own BERT, without custom code, and a model with
ModernBERT's architecture becomes transformers' ModernBERT. BERT counts positions from the left, including padding, and
without an attention mask it attends to all tokens. Our model and the exported BERT therefore agree on inputs that are
padded on the right and have an attention mask. Heads are converted to BERT's heads:

| our head | BERT's head |
|---|---|
| `dense` classification head | pooler and classifier |
| next-sentence head | pooler and ``cls.seq_relationship`` |
| span head | ``qa_outputs`` |
| tag head | classifier of a BertForTokenClassification |
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
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.storage.atomic import atomic_folder

AUTO = "auto"
NAMES = {BERT: "BERT", MODERN: "ModernBERT"}  # transformers' own models
CARD_FILE = "README.md"
WORDS = "masked words"
FEATURES = "features"
# The tolerance for outputs around 1 computed by two implementations in double precision.
CLOSE = 1e-6


def export_to_huggingface(
    folder: Union[str, Path],
    out: Union[str, Path],
    form: str = AUTO,
    head: Optional[str] = None,
    name: Optional[str] = None,
) -> str:
    """Export a checkpoint to a folder that transformers loads; the folder is written completely or not at all.

    Before the folder is renamed to `out`, the model is read back and its outputs are compared with the checkpoint's.

    Args:
        folder: A folder of checkpoints; see :func:`lazyformer_fairseq.evaluation.loading.load`.
        out: The folder to write, which must not exist or must be empty.
        form: "bert" or "modernbert" for one of transformers' own models, "custom" for a model with its own code, or
            "auto" for the first of these that is possible.
        head: The name of the classification or span head to export. None exports the only head, if any.
        name: The name under which users will load the model, for the model card. None uses the folder's name.

    Returns:
        The chosen form.

    Raises:
        UserError: The checkpoint cannot be loaded, the head does not exist or is ambiguous, the model cannot have the
            requested form, a sublayer's code cannot be exported, or `out` exists.
    """
    path = checkpoint_at(Path(folder))
    state = checkpoints.load(path)
    name = name or Path(out).name
    if loading.is_causal(state):
        if form in (BERT, MODERN) or head is not None:
            raise UserError(f"{path} is a causal language model, which supports neither --as nor --head")
        with atomic_folder(Path(out)) as unfinished:
            write_causal(state, path, unfinished)
            dictionary = dictionary_of_causal(state, path)
            has_tokenizer = dictionary is not None and write_causal_tokenizer(dictionary, unfinished)
            card = causal_card(state, name, has_tokenizer)
            (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        return CAUSAL
    loaded = loading.load_state(state, path, loading.load_tokenizer_beside(path))
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
        card = model_card(source, form, name)
        (unfinished / CARD_FILE).write_text(card, encoding="utf-8")
        check_same_outputs(source, model_class.from_pretrained(str(unfinished)))
    return form


def dictionary_of_causal(state: Mapping[str, Any], path: Path) -> Optional[Dictionary]:
    """Find a causal language model's dictionary, either beside the checkpoint or in the training data's folder.

    Args:
        state: The content of the checkpoint.
        path: The checkpoint file.

    Returns:
        The dictionary, or None if neither location has the one that the checkpoint was trained with.

    Raises:
        UserError: A dict.txt file is not a dictionary.
    """
    task = state["cfg"].get("task") or {}
    data = str(task.get("data") or "").split(":")[0]
    places = [path.parent, path.parent / "data"]
    if data:
        places.append(Path(data))
    for place in places:
        file = place / "dict.txt"
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
    """Return the classification or span head to export.

    Args:
        weights: The checkpoint's weights.
        name: The name of the head. None chooses the only fine-tuned head, and never the next-sentence head.
        path: The checkpoint file, for messages.
        tasks: Descriptions of the tasks that heads were trained on, by head name.

    Returns:
        The head, or None if `name` is None and the checkpoint has no fine-tuned head.

    Raises:
        UserError: The checkpoint has no head with this name, or it has several heads and `name` is None.
    """
    there = heads_in_checkpoint(dict(weights))
    fine_tuned = [head for head in there if head != NEXT_SENTENCE]
    if name is None and len(fine_tuned) > 1:
        raise UserError(
            f"{path} has the classification heads {', '.join(there)}, but an export contains only one: choose one with "
            "--head"
        )
    if name is not None and name not in there:
        known = ", ".join(there) or "none"
        raise UserError(
            f"{path} has no classification head {name!r}; it has these heads: {known}{nearest(name, there)}"
        )
    chosen = name or next(iter(fine_tuned), None)
    if chosen is None:
        return None
    outputs, head_type = there[chosen]
    if chosen not in tasks:
        return Head(chosen, outputs, head_type)
    return Head(chosen, outputs, head_type, tasks[chosen].labels, tasks[chosen].is_multi_label)


def choose_form(source: Source, form: str) -> str:
    """Return the requested form; for "auto", the first form that is possible.

    Raises:
        UserError: The model cannot be exported in the requested form.
    """
    reasons = {BERT: why_not_bert(source), MODERN: why_not_modernbert(source), CUSTOM: ""}
    if form == AUTO:
        return next(each for each, reason in reasons.items() if not reason)
    if reasons[form]:
        raise UserError(
            f"--as {form}: this model is not a {NAMES[form]}, because {reasons[form]}; use --as custom to export the "
            "model with its own code"
        )
    return form


@torch.no_grad()
def check_same_outputs(source: Source, model: Any) -> None:
    """Raise a UserError if the exported model's outputs on padded texts differ from the checkpoint's.

    Both models are converted to double precision, because in single precision a deep model's rounding errors may be as
    large as the effect of a small mistake.
    """
    source.model.double().encoder.sentence_encoder.attention_backend = "eager"
    model = model.double()
    dictionary = source.tokenizer.dictionary
    time = min(24, source.cfg.max_positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(dictionary), (2, time), generator=generator)
    ids[ids == dictionary.pad()] = dictionary.unk()
    ids[:, 0] = dictionary.bos()
    ids[1, time * 2 // 3 :] = dictionary.pad()
    is_text = ids.ne(dictionary.pad())

    our_inputs: dict[str, Tensor] = {}
    exported_inputs: dict[str, Tensor] = {"attention_mask": is_text.long()}
    sublayers = source.model.encoder.sentence_encoder.plan
    if any(planned.values.get("global") == GIVEN for planned in sublayers):
        marked = torch.zeros_like(ids)
        marked[:, 1] = 1
        exported_inputs["global_attention_mask"] = marked
        our_inputs["global_positions"] = marked.bool()
    if source.cfg.token_types:
        types = torch.arange(time).expand_as(ids) % source.cfg.token_types
        exported_inputs["token_type_ids"] = types
        our_inputs["token_types"] = types

    output = model(ids, **exported_inputs)
    head = NEXT_SENTENCE
    if source.head is not None:
        head = source.head.name
    found = _name_outputs(output, head)
    for name, logits in found.items():
        asked = {}
        if name == FEATURES:
            asked["features_only"] = True
        elif name != WORDS:
            asked["classification_head_name"] = name
        wanted, _ = source.model(ids, **our_inputs, **asked)
        difference = logits - wanted
        if wanted.dim() == 3:  # one output per token
            difference = difference[is_text]
            wanted = wanted[is_text]
        scale = wanted.abs().max().clamp(min=1)
        error = float(difference.abs().max() / scale)
        if not error < CLOSE:
            raise UserError(
                f"the exported model's {name} logits differ from the checkpoint's by {error:.1g}; nothing was written"
            )


def _name_outputs(output: Any, head: str) -> dict[str, Tensor]:
    """Return a transformers model's outputs by name: the head's name, :data:`WORDS` or :data:`FEATURES`."""
    if "start_logits" in output:
        return {head: torch.stack([output.start_logits, output.end_logits], -1)}
    if "last_hidden_state" in output:
        return {FEATURES: output.last_hidden_state}
    if "prediction_logits" in output:
        return {WORDS: output.prediction_logits, head: output.seq_relationship_logits}
    if output.logits.dim() == 3 and head == NEXT_SENTENCE:  # the export has no task head
        return {WORDS: output.logits}
    return {head: output.logits}


UNKNOWN = "unknown; the checkpoint does not record it"
CARD = """\
---
library_name: transformers
pipeline_tag: {pipeline}
license: unknown
tags:
- lazyformer
- lazyformer_fairseq{tag}
---

# {name}

{model} trained with lazyformer_fairseq. Its sublayer pattern is `{pattern}`. Each letter is a residual sublayer, lowest
first:

| letter | sublayer | output | source |
|---|---|---|---|
{kinds}

| model | |
|---|---|
{rows}

## How to use

```python
{imports}

{tokenizer}model = {auto}.from_pretrained("{name}"{trust})
```

{code}

## Training data

To be filled in: the texts, their languages and licenses, how they were cleaned, and what the model should not be used
for.

## Evaluation

To be filled in: the scores, the data they were measured on, the number of seeds, and the spread.

## Citation

Please cite lazyformer_fairseq and the papers listed in the table of sublayers.

## License

To be filled in: choose a license, and state it here and in the header (`license:`). The licenses of the training data
may restrict your choice.
"""
TOKENIZER = 'tokenizer = {loader}.from_pretrained("{name}")\n'
NEEDS_PACKAGE = """\
The model requires lazyformer_fairseq, because this folder contains no code. {tokenizer} `model.generate` remembers the
whole text, whereas during training the memory contained the last {mem_len} tokens before each segment."""
OF_DATA = "The tokenizer splits texts in the same way as the training data was split; unknown symbols become `<unk>`."
NO_TOKENIZER = """\
There is no tokenizer. Token ids follow the training data's `dict.txt`. Its first word has id 4, after `<s>`, `<pad>`,
`</s>` and `<unk>`."""
PLAIN = """\
This is a plain {model}, which transformers loads without custom code. Pad inputs on the right and pass an attention
mask, as the tokenizer does."""
OWN_CODE = """\
The `*.py` files contain all of the model's code and require torch, numpy and transformers. If lazyformer_fairseq is
installed, you can `import lazyformer_fairseq.huggingface` first and omit `trust_remote_code`."""


def model_card(source: Source, form: str, name: str) -> str:
    """Return the text of README.md, in Markdown with the Hub's metadata header.

    Information that the checkpoint does not record, such as scores and a license, is left to be filled in.

    Args:
        source: The checkpoint.
        form: The export's form.
        name: The folder's name.
    """
    trust = ""
    loader = "AutoTokenizer"
    tag = f"\n- {form}"
    if form == CUSTOM:
        trust = ", trust_remote_code=True"
        # The tokenizer needs no code, but AutoTokenizer reads config.json and asks whether to run the code it names.
        loader = "PreTrainedTokenizerFast"
        tag = ""
        code = OWN_CODE
    else:
        code = PLAIN.format(model=NAMES[form])
    auto = f"AutoModel{source.use.ending}"
    return CARD.format(
        model="An encoder",
        imports=f"from transformers import {', '.join(sorted([auto, loader]))}",
        tokenizer=TOKENIZER.format(name=name, loader=loader),
        pipeline=source.use.pipeline,
        tag=tag,
        name=name,
        pattern=source.cfg.sublayer_pattern,
        kinds=_kinds(source.cfg.sublayer_pattern),
        rows=_table({**_rows(source), **source.training}),
        auto=auto,
        trust=trust,
        code=code,
    )


def causal_card(state: Mapping[str, Any], name: str, has_tokenizer: bool) -> str:
    """Return the text of README.md for a causal language model.

    Args:
        state: The content of the checkpoint.
        name: The folder's name.
        has_tokenizer: Whether the folder contains a tokenizer.
    """
    options = causal_options(state)
    weights = state["model"]
    parameters = sum(weight.numel() for part, weight in weights.items() if part != "dictionary_sha256")
    rows = {"parameters": f"{parameters:,}", "vocabulary": f"{weights['softmax.bias'].size(0):,} symbols"}
    classes = "AutoModelForCausalLM"
    tokenizer = ""
    of_tokenizer = NO_TOKENIZER
    if has_tokenizer:
        classes += ", AutoTokenizer"
        tokenizer = TOKENIZER.format(name=name, loader="AutoTokenizer")
        of_tokenizer = OF_DATA
    return CARD.format(
        pipeline="text-generation",
        tag="",
        model="A causal language model",
        name=name,
        pattern=options.sublayer_pattern,
        kinds=_kinds(options.sublayer_pattern),
        rows=_table({**rows, **training_of(state)}),
        imports=f"import lazyformer_fairseq.huggingface\nfrom transformers import {classes}",
        tokenizer=tokenizer,
        auto="AutoModelForCausalLM",
        trust="",
        code=NEEDS_PACKAGE.format(mem_len=options.mem_len, tokenizer=of_tokenizer),
    )


def _kinds(pattern: str) -> str:
    """Return one table row per kind of sublayer in a pattern."""
    kinds = dict.fromkeys(planned.kind for planned in plan(pattern))
    return "\n".join(f"| `{kind.letter}` | {kind.name} | {kind.help} | {kind.source} |" for kind in kinds)


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(f"| {title} | {value} |" for title, value in rows.items())


def _rows(source: Source) -> dict[str, str]:
    """Return the model card's rows that describe the model."""
    options = source.cfg
    head = source.head
    named = source.model.named_parameters()
    parameters = sum(weight.numel() for name, weight in named if not name.startswith("classification_heads."))
    place = "post-norm"
    if options.encoder_normalize_before:
        place = "pre-norm"
    rows = {
        "sublayers": f"`{options.sublayer_pattern}`, {place}",
        "parameters": f"{parameters:,}, without classification heads",
        "width": f"{options.encoder_embed_dim:,}",
        "feed-forward width": f"{options.encoder_ffn_embed_dim:,}",
        "attention heads": f"{options.encoder_attention_heads:,}",
        "positions": f"{options.max_positions:,}",
        "vocabulary": f"{len(source.tokenizer.dictionary):,} symbols",
    }
    if not source.has_lm_head:
        rows["masked-LM head"] = "none; the head in the checkpoint was never trained, so the model cannot fill masks"
    if head is not None and head.type == SPAN:
        rows["span head"] = f"{head.name}: the start and the end of an answer"
    elif head is not None:
        labels = ", ".join(head.labels)
        if not labels:
            labels = "regression" if head.outputs == 1 else "unnamed classes"
        rows["classification head"] = f"{head.name}: {labels}"
    return rows


def training_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a checkpoint's training record for the model card: data, task, and the updates of each run.

    Only the last component of each data folder's path is kept.
    """
    task = (state.get("cfg") or {}).get("task") or {}
    data = str(task.get("data") or "")
    folders = [f"`{Path(folder).name}`" for folder in data.split(":") if folder]
    runs = state.get("optimizer_history") or ()
    updates = [int(run.get("num_updates", 0)) for run in runs]
    name = UNKNOWN
    if task.get("_name"):
        name = f"`{task['_name']}`"
    return {
        "trained on": ", ".join(folders) or UNKNOWN,
        "task": name,
        "updates": " and then ".join(f"{number:,}" for number in updates if number) or UNKNOWN,
    }
