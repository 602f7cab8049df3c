"""The plan of a pattern as the exported config has it."""

from typing import Any

from lazyformer_fairseq.patterns.attention_kinds import SETTINGS, chosen_kinds
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER


def plan_as_json(pattern: str) -> list[dict[str, Any]]:
    """Of an encoder's pattern: what :func:`~lazyformer_fairseq.huggingface.exported.modelling.read_plan` reads.

    `kinds` of attention are the outermost first, `settings` all of theirs, or those of another letter. `giver` is a
    number of a sublayer.

    Raises:
        UserError: as :func:`~lazyformer_fairseq.patterns.grammar.plan` does.
    """
    found, newest = [], {}
    for number, planned in enumerate(plan(pattern, ENCODER)):
        rows = chosen_kinds(planned.values)
        own = [setting for setting in planned.kind.settings if setting not in SETTINGS]
        names = [setting.name for settings in (*(row.settings for row in rows), own) for setting in settings]
        found.append(
            {
                "letter": planned.kind.letter,
                "kinds": [row.name for row in rows],
                "settings": {name: planned.values[name] for name in names},
                "readers": list(planned.consumers),
                "giver": newest[planned.kind.reads] if planned.kind.reads else None,
            }
        )
        newest |= dict.fromkeys(planned.kind.hands_on, number)
    return found
