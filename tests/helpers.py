"""What tests share beside fixtures."""

import random
from pathlib import Path

from lazyformer_fairseq.corpus.documents import Document

ROOT = Path(__file__).resolve().parent.parent

NAMES = ["anna", "ben", "cara", "dan", "eva", "finn", "gina", "hugo", "ida", "jan", "kim", "lea", "max", "nina", "otto"]
VERBS = ["sees", "likes", "calls", "hears", "helps", "finds", "meets", "knows", "thanks", "asks"]
THINGS = ["house", "garden", "river", "letter", "window", "bridge", "market", "forest", "island", "mirror"]


def toy_documents(count: int, seed: int = 1) -> list[Document]:
    """Documents of short sentences that a tiny model can learn a little of."""
    rng = random.Random(seed)

    def sentence() -> str:
        first, second = rng.sample(NAMES, 2)
        return rng.choice(
            [
                f"{first.title()} {rng.choice(VERBS)} {second.title()} near the {rng.choice(THINGS)}.",
                f"The {rng.choice(THINGS)} of {first.title()} is behind the old {rng.choice(THINGS)}.",
                f"{first.title()} and {second.title()} walk to the {rng.choice(THINGS)} together.",
            ]
        )

    return [Document(f"toy:{n}", (" ".join(sentence() for _ in range(rng.randint(1, 9))),)) for n in range(count)]
