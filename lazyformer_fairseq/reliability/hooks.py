"""The one list of what of fairseq's training is wrapped to make a run safe, and why.

The logic is in the modules beside this one.
"""


def install() -> None:
    """Applies all of it; called once, when the package is imported."""
