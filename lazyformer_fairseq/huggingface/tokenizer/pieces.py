"""A SentencePiece model's pieces as a BPE or Unigram model of the ``tokenizers`` library, ids as in dict.txt."""

from collections.abc import Sequence
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, models, normalizers, pre_tokenizers

from lazyformer_fairseq.data.text.moses import BREAK, SIGNS
from lazyformer_fairseq.data.text.normalisation import UNKNOWN
from lazyformer_fairseq.data.text.tokenizer import SPACE, UNK
from lazyformer_fairseq.errors import UserError

Proto, TrainerSpec = sentencepiece_model_pb2.ModelProto, sentencepiece_model_pb2.TrainerSpec
Piece = Proto.SentencePiece
NOT_THERE = "Hugging Face's tokenizers have none such"
WITHOUT_TEXT = (Piece.UNKNOWN, Piece.CONTROL)


def read_model(path: Path) -> Proto:
    """The file's contents, already known to be a SentencePiece model.

    Raises:
        UserError: it is of a kind that only SentencePiece itself encodes.
    """
    proto = Proto()
    proto.ParseFromString(path.read_bytes())
    kind = TrainerSpec.ModelType.Name(proto.trainer_spec.model_type)
    if kind not in ("BPE", "UNIGRAM"):
        raise UserError(f"{path}: a SentencePiece model of type {kind}; {NOT_THERE}, they have BPE and UNIGRAM")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(f"{path}: its pieces end with the space, treat_whitespace_as_suffix; {NOT_THERE}")
    texts = {piece.piece for piece in proto.pieces}
    for piece in proto.pieces:
        if piece.type in (Piece.USER_DEFINED, Piece.UNUSED):
            raise UserError(f"{path}: piece {piece.piece!r} is of kind {Piece.Type.Name(piece.type)}; {NOT_THERE}")
        if kind == "BPE" and piece.type == Piece.NORMAL and not texts.issuperset(piece.piece):
            raise UserError(f"{path}: piece {piece.piece!r} has a character that is no piece; {NOT_THERE}")
    return proto


def model(proto: Proto, symbols: Sequence[str]) -> models.Model:
    """The same pieces for each word that starts with SentencePiece's sign for a space.

    Args:
        symbols: all symbols of the dictionary; ids are their places.
    """
    byte_fallback = proto.trainer_spec.byte_fallback
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM:
        return models.Unigram(_scores(proto, symbols), UNK, byte_fallback)
    ids = {symbol: index for index, symbol in enumerate(symbols)}
    return models.BPE(ids, _merges(proto), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=byte_fallback)


def normalisers(proto: Proto) -> list[normalizers.Normalizer]:
    """What SentencePiece does to the words before it looks for pieces."""
    charsmap = proto.normalizer_spec.precompiled_charsmap
    of_the_model = [normalizers.Precompiled(charsmap)] if charsmap else []
    # SentencePiece takes its sign for a space away at the end, and writes one before every word; the library writes
    # none before a word that has one.
    at_the_end = normalizers.Replace(Regex(f"[ {SPACE}]+(?![^{SIGNS}])"), "")
    before_one = normalizers.Replace(Regex(f"(?<![^ {SIGNS}]){SPACE}"), 2 * SPACE)
    return [*of_the_model, at_the_end, before_one]


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Words, each with the sign for a space before it."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False),
            pre_tokenizers.Split(BREAK, "removed"),
        ]
    )


def _merges(proto: Proto) -> list[tuple[str, str]]:
    """Any two pieces beside each other become the one that they spell, the best score first (Sennrich et al., 2016)."""
    texts = {piece.piece: piece.score for piece in proto.pieces if piece.type == Piece.NORMAL}
    merges = []
    for text in sorted(texts, key=lambda text: -texts[text]):  # stable: the first of equals stays first
        pairs = [(text[:place], text[place:]) for place in range(1, len(text))]
        merges += [(left, right) for left, right in pairs if left in texts and right in texts]
    return merges


def _scores(proto: Proto, symbols: Sequence[str]) -> list[tuple[str, float]]:
    """Log-probabilities by id; symbols that are no pieces are as unlikely as the rarest piece."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type not in WITHOUT_TEXT}
    rarest = min(scores.values())
    return [(symbol, scores.get(symbol, rarest)) for symbol in symbols]
