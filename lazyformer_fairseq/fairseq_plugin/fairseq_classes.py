"""Our datasets and dictionaries as fairseq's: it asserts that datasets are its own, and asks more of a dictionary."""

from functools import cache
from typing import Any, TypeVar

from fairseq.data import Dictionary, FairseqDataset
from torch.utils.data import Dataset

from lazyformer_fairseq.data.text import dictionary_file

Plain = TypeVar("Plain")


@cache
def fairseq_class(plain: type) -> type:
    """Return the class of the same name that is fairseq's too; the plain one goes first. Pickled, it stays so."""
    base = Dictionary if issubclass(plain, dictionary_file.Dictionary) else FairseqDataset
    members = {"__doc__": plain.__doc__, "__module__": plain.__module__}
    return type(plain.__name__, (plain, base), {**members, "__reduce__": lambda self: (_again, (plain, vars(self)))})


def as_fairseq(thing: Plain) -> Plain:
    """Make a dataset or dictionary of ours fairseq's too, and return it; leave all else as it is."""
    is_plain = not isinstance(thing, (Dictionary, FairseqDataset))
    if is_plain and isinstance(thing, (dictionary_file.Dictionary, Dataset)):
        thing.__class__ = fairseq_class(type(thing))
    return thing


def _again(plain: type, attributes: dict[str, Any]) -> Any:
    thing = fairseq_class(plain).__new__(fairseq_class(plain))
    vars(thing).update(attributes)
    return thing
