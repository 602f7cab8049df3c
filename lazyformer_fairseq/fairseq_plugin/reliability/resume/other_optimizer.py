"""A run that resumes by another optimizer or criterion than its checkpoint's is told so in words."""

from lazyformer_fairseq.errors import UserError

_FAIRSEQS_WORDS = "does not match; please reset the optimizer (--reset-optimizer). "


def name_what_differs(original, self, filename, *args, **kwargs):
    """For ``Trainer.load_checkpoint``. Raises a UserError in place of fairseq's AssertionError."""
    try:
        return original(self, filename, *args, **kwargs)
    except AssertionError as error:
        what, found, names = str(error).partition(_FAIRSEQS_WORDS)
        if not found:
            raise
        there, _, here = names.partition(" vs ")
        raise UserError(
            f"{filename}: was trained with the {what.strip().lower()} {there}, not {here}: give the options that it "
            "was trained with, another --save-dir, or --reset-optimizer to go on with fresh moments"
        ) from None
