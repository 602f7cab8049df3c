"""What a pattern's error says, and where its caret stands."""

from typing import Optional

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import plan


def assert_refused(pattern: str, under: str, why: str, direction: Optional[str] = None) -> None:
    """A pattern is refused: the message says why, and its caret stands where `under` first begins."""
    with pytest.raises(UserError) as caught:
        plan(pattern, direction)
    *_, shown, caret = str(caught.value).splitlines()
    assert why in str(caught.value)
    assert caret.index("^") - shown.index(pattern) == pattern.index(under)
