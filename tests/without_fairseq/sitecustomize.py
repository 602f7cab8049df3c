"""On PYTHONPATH, it hides fairseq and what comes with it alone, as if they were not installed; see conftest.py."""

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution

HIDDEN = {"fairseq", "fairseq_cli", "sacrebleu", "bitarray", "torchaudio"}
DISTRIBUTIONS = {"fairseq-fixed", *HIDDEN}


class Finder(PathFinder):
    """Finds all but those."""

    @classmethod
    def find_spec(cls, fullname: str, *place: object) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else PathFinder.find_spec(fullname, *place)

    @classmethod
    def find_distributions(cls, *context: object) -> Iterable[Distribution]:
        return (found for found in PathFinder.find_distributions(*context) if found.name not in DISTRIBUTIONS)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:
    del sys.modules[name]  # a process of the warm server has some
