"""What is wrong with an input file, in words."""

from lazyformer_fairseq.errors import UserError


class BadInput(UserError):
    """A file that cannot be read to its end; the message names the file, the place and the reason."""
