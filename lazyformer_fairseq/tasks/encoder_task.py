"""What the tasks of an encoder share."""

from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask


class EncoderTask(FairseqTask):
    """A task that reads and predicts symbols of one dictionary.

    Attributes:
        dictionary: of inputs and targets alike.
    """

    dictionary: Dictionary

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary
