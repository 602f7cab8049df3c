"""The plan of a pattern as the exported config has it, and the parts of the modelling code that it needs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS, SETTINGS, chosen_kinds
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER, find_kind

MODELLING = Path(__file__).parents[1] / "modelling"


def plan_as_json(pattern: str) -> list[dict[str, Any]]:
    """Of an encoder's pattern: what :class:`~lazyformer_fairseq.huggingface.modelling.interface.PlannedSublayer` has.

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


def parts_of(plan: Iterable[Mapping[str, Any]]) -> list[str]:
    """Files of ``modelling`` that have the sublayers and kinds of attention of a plan: they are called as ours are.

    Raises:
        UserError: nobody has written one of them.
    """
    rows = {row.name: row for row in ATTENTION_KINDS}
    needed: dict[str, str] = {}
    for place in plan:
        module = find_kind(place["letter"]).modules[ENCODER]
        name = module.partition(":")[0] if isinstance(module, str) else module.__module__
        needed[name.rpartition(".")[2]] = f"{find_kind(place['letter']).name} ({place['letter']})"
        for kind in place["kinds"]:
            needed[f"kinds.{rows[kind].module.partition(':')[0]}"] = f"s[{kind}=...]"
    for part, kind in needed.items():
        file = f"{part.replace('.', '/')}.py"
        if not (MODELLING / file).is_file():
            raise UserError(
                f"{kind} cannot be exported to Hugging Face: nobody has written it for transformers, in "
                f"huggingface/modelling/{file}; lazyformer export --to safetensors takes every kind"
            )
    return list(needed)
