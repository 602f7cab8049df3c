"""Makes a tokenizer folder of the files that came with a BERT or RoBERTa; of these it reads JSON and plain text alone.

Which symbol plays which part stands in tokenizer_config.json or special_tokens_map.json; what a text goes through in
tokenizer.json or, beside a vocab.txt, in tokenizer_config.json. Where both say it the latter wins, as in transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

from lazyformer_fairseq.data.text.library.recipe import (
    ACCEPTED,
    build_library,
    check_recipe,
    ids_of,
    library_from,
    refusals_of_the_library,
)
from lazyformer_fairseq.data.text.library.tokenizer import LibraryTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.storage.json_files import read_json

NAMES_OF_ROLES = {
    "bos": "cls_token",
    "pad": "pad_token",
    "eos": "sep_token",
    "unk": "unk_token",
    "mask": "mask_token",
}
USUAL_NAMES = (("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
OPTIONS_OF_BERT = {  # of tokenizer_config.json -> of the library's normaliser
    "do_lower_case": ("lowercase", (bool,)),
    "strip_accents": ("strip_accents", (bool, type(None))),
    "tokenize_chinese_chars": ("handle_chinese_chars", (bool,)),
}
SENTENCE_PIECE_FILES = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
ADVICE = "download the model's folder again"


def adopt_tokenizer(source: Union[str, Path], out: Union[str, Path], rows: Optional[int] = None) -> LibraryTokenizer:
    """Writes the tokenizer folder `out` of a model's own tokenizer, whole or not at all. Ids stay what they are.

    Args:
        source: folder with ``tokenizer.json``, or ``vocab.txt`` (WordPiece), or ``vocab.json`` and ``merges.txt``
            (byte-level BPE); beside it perhaps ``tokenizer_config.json``, ``special_tokens_map.json``, ``config.json``.
        out: must not exist yet, or be empty.
        rows: of the model's word embedding; by default those of ``config.json``, else as many as there are ids. A row
            without a symbol gets a name of its own.

    Raises:
        UserError: no tokenizer there, one of another kind (SentencePiece, say), without one of the five special
            symbols, with more ids than rows, or damaged; a folder that exists.
    """
    refuse_without_extra("huggingface", "a tokenizer that came with another model")
    source, out = Path(source), Path(out)
    refuse_filled_folder(out)
    options = _optional_json(source / "tokenizer_config.json")
    path = _main_file(source)
    try:
        values = _values(source, path, options)
        recipe = check_recipe(values)
        ids = ids_of(recipe)
        special = _special_symbols(source, options, ids)
        if path.name == "vocab.txt":
            recipe["model"]["unk_token"] = special["unk"]
        recipe = _with_added(recipe, special, options)
        separators, second_type = _joining(recipe, values.get("post_processor"), special, ids)
        described = {"separators": separators, "second_type": second_type}
        config = _optional_json(source / "config.json")
        rows = rows if rows is not None else _rows(config, ids)
        tokenizer = LibraryTokenizer.write(recipe, {"special": special, "rows": rows, **described}, out)
    except UserError as error:
        raise UserError(str(error) if str(source) in str(error) else f"{path}: {error}") from None
    return tokenizer


def _main_file(source: Path) -> Path:
    """The file that holds the vocabulary."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; give the one with the model's config.json")
    for name in ("tokenizer.json", "vocab.txt"):
        if (source / name).is_file():
            return source / name
    if (source / "vocab.json").is_file() and (source / "merges.txt").is_file():
        return source / "vocab.json"
    for name in SENTENCE_PIECE_FILES:
        if (source / name).is_file():
            raise UserError(f"{source / name}: is a SentencePiece model (ALBERT, DeBERTa, XLM-R); {ACCEPTED}")
    raise UserError(
        f"{source}: no tokenizer there; expected tokenizer.json, or vocab.txt, or vocab.json and merges.txt"
    )


def _values(source: Path, path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer.json, or what would stand there."""
    if path.name == "tokenizer.json":
        values = read_json(path, ADVICE)
    elif path.name == "vocab.txt":
        values = _word_piece(_read_text(path).split("\n"))
    else:
        values = _byte_level(read_json(path, ADVICE), _read_text(source / "merges.txt").split("\n"))
    if path.name != "tokenizer.json":
        added = _optional_json(source / "added_tokens.json")
        values["added_tokens"] = [{"id": index, "content": symbol} for symbol, index in added.items()]
    normaliser, division = values.get("normalizer"), values.get("pre_tokenizer")
    if isinstance(normaliser, dict) and normaliser.get("type") == "BertNormalizer":
        for name, (field, types) in OPTIONS_OF_BERT.items():
            if name in options and type(options[name]) in types:
                normaliser[field] = options[name]
    prefixed = options.get("add_prefix_space")
    if type(prefixed) is bool and isinstance(division, dict) and division.get("type") == "ByteLevel":
        division["add_prefix_space"] = prefixed
    return values


def _word_piece(lines: list[str]) -> dict[str, Any]:
    """BERT's tokenizer of a vocab.txt: a line for each id. Lower-case unless a piece has upper case."""
    if lines[-1] == "":
        lines.pop()
    vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
    is_cased = any(any(map(str.isupper, piece)) for piece in vocabulary if not piece.startswith(("[", "<")))
    return {
        "model": {"type": "WordPiece", "vocab": vocabulary},
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not is_cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }


def _byte_level(vocabulary: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """RoBERTa's tokenizer of a vocab.json and a merges.txt, whose first line may name a version."""
    merges = [line.removesuffix("\r") for line in lines if line.strip() and not line.startswith("#version")]
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    }


def _special_symbols(source: Path, options: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, str]:
    """The symbol of each part: as the files name it, else as BERT or RoBERTa call it."""
    named = {**_optional_json(source / "special_tokens_map.json"), **options}
    usual = next((names for names in USUAL_NAMES if all(name in ids for name in names)), (None,) * len(NAMES_OF_ROLES))
    special = {}
    for (role, name), default in zip(NAMES_OF_ROLES.items(), usual, strict=True):
        symbol = named.get(name)
        symbol = symbol.get("content") if isinstance(symbol, dict) else symbol
        symbol = default if symbol is None else symbol
        if not isinstance(symbol, str) or symbol not in ids:
            raise UserError(
                f"has no {name} ({str(symbol)[:40]!r}); a masked language model needs all of "
                f"{', '.join(NAMES_OF_ROLES.values())}"
            )
        special[role] = symbol
    if len(set(special.values())) < len(special):
        raise UserError(f"its special symbols {special} are not five different ones")
    wanted = _optional_json(source / "config.json").get("pad_token_id")
    if type(wanted) is int and wanted != ids[special["pad"]]:
        raise UserError(
            f"its padding symbol {special['pad']!r} is id {ids[special['pad']]}, but config.json says {wanted}; is it "
            "this model's tokenizer?"
        )
    return special


def _with_added(recipe: dict[str, Any], special: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with all special symbols among the added tokens, which a text may hold whole."""
    ids = ids_of(recipe)
    there = {token["content"] for token in recipe["added_tokens"]}
    added = list(recipe["added_tokens"])
    for role, symbol in special.items():
        if symbol not in there:
            # RoBERTa's mask takes the space before it along, whatever an old folder says of it.
            takes_space = role == "mask" and recipe["model"]["type"] == "BPE"
            described = options.get(NAMES_OF_ROLES[role])
            if isinstance(described, dict) and type(described.get("lstrip")) is bool:
                takes_space = described["lstrip"]
            flags = dict.fromkeys(("single_word", "rstrip", "normalized"), False)
            added.append({"id": ids[symbol], "content": symbol, **flags, "lstrip": takes_space, "special": True})
    return {**recipe, "added_tokens": added}


def _joining(
    recipe: Mapping[str, Any], post_processor: Any, special: Mapping[str, str], ids: Mapping[str, int]
) -> tuple[int, int]:
    """How many separators stand in a pair, and the token type of its second text: asked of the library itself."""
    if post_processor is None:
        return (1, 1) if recipe["model"]["type"] == "WordPiece" else (2, 0)
    build_library(recipe)  # is the rest all right?
    library = library_from({**recipe, "post_processor": post_processor})
    bos, eos = ids[special["bos"]], ids[special["eos"]]
    with refusals_of_the_library():
        single, pair = library.encode("a"), library.encode("a", "a")
    around = [
        [index for index, is_special in zip(of.ids, of.special_tokens_mask, strict=True) if is_special]
        for of in (single, pair)
    ]
    if around[0] != [bos, eos] or around[1] not in ([bos, eos, eos], [bos, eos, eos, eos]):
        names = [[library.id_to_token(index) for index in of] for of in around]
        raise UserError(
            f"puts {names[0]} around a text and {names[1]} around a pair; this program knows [CLS] a [SEP] b [SEP] and "
            "<s> a </s></s> b </s>"
        )
    return len(around[1]) - 2, min(pair.type_ids[-1], 1)


def _rows(config: Mapping[str, Any], ids: Mapping[str, int]) -> int:
    size = config.get("vocab_size")
    return size if type(size) is int else 1 + max(ids.values())


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, ADVICE) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); {ADVICE}") from None
