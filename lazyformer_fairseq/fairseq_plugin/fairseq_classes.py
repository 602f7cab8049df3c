"""Adapters that turn our datasets and dictionaries into instances of fairseq's classes.

fairseq asserts that datasets are instances of its own class, and calls dictionary methods that our class lacks.
"""

from functools import cache
from typing import Any, TypeVar

from fairseq.data import Dictionary, FairseqDataset
from torch.utils.data import Dataset

from lazyformer_fairseq.data.text import dictionary_file

Plain = TypeVar("Plain")


@cache
def fairseq_class(plain: type) -> type:
    """Return a picklable subclass of one of our classes and of fairseq's dictionary or dataset class.

    The subclass has our class's name, and our class's methods take precedence.
    """

    def reduce(instance: Any) -> tuple[Any, ...]:
        return _unpickle, (plain, vars(instance))

    base = Dictionary if issubclass(plain, dictionary_file.Dictionary) else FairseqDataset
    members = {"__doc__": plain.__doc__, "__module__": plain.__module__, "__reduce__": reduce}
    return type(plain.__name__, (plain, base), members)


def as_fairseq(instance: Plain) -> Plain:
    """Make one of our datasets or dictionaries an instance of fairseq's class as well, in place, and return it.

    Other objects are returned unchanged.
    """
    is_plain = not isinstance(instance, (Dictionary, FairseqDataset))
    if is_plain and isinstance(instance, (dictionary_file.Dictionary, Dataset)):
        instance.__class__ = fairseq_class(type(instance))
    return instance


def _unpickle(plain: type, attributes: dict[str, Any]) -> Any:
    instance = fairseq_class(plain).__new__(fairseq_class(plain))
    vars(instance).update(attributes)
    return instance
