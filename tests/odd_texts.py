"""Texts that try what Moses' rules look at, and real ones."""

import bz2
from collections.abc import Iterator
from pathlib import Path

from hypothesis import strategies as st

WORDS = (
    "a b c d e f g i m n p s t u v x z A B C D I M S T U 5 42 1 x5 5x word Word s's the don ll re DOT MULTI DOTMULTI "
    "Mr St No Nr pp Art Prof Mme av ca bzw etc vol é ß ñ nº Ж слово Σ ΟΔΟΣ ½ ² ٣ 三 猫 à_b THISISPROTECTED000"
).split()
MARKS = [
    *".,'\"`()[]{}<>%:;!?-_/\\@#&*|~^$=+…‘’‚„“”«»–—´€£°º·،。\u0301",
    *'... .. \'\' `` ´´ @-@ .\' ." ," ". "...'.split(),
]
SPACES = [*[" "] * 12, "  ", "\u00a0", "\u00a0", "\u2009", "\t", "\n", "\r", "\x01", "\x1f", "\u200b", "\xad", "\u3000"]
texts = st.lists(
    st.sampled_from(WORDS) | st.sampled_from(MARKS) | st.sampled_from(SPACES[:13]) | st.sampled_from(MARKS + SPACES),
    max_size=16,
).map("".join)

# What a rule sees beyond a word or a space, found by reading the rules.
TELLING = [
    "5' '6 and 5'6'7, rock'n'roll, o'n'e ' ' x '' '5.",  # a match takes the letter or space of the next one with it
    ",5 and ,5 a,b,c,5,6, 5,",  # a comma where the text starts
    "He said ( this ) ; that : 5 % ) . ( a ) , (b)",  # spaces that go
    "nº\u00a0? ”nº\u00a0; x\u00a0ºC 5\u00a0cm\u00a0! « x »\u00a0:",  # two letters and a space that goes
    "x5.1. X x5.1. x 5.1. 5a5.². 3.11.7. 1\u00a0234abc. 1\u00a02\u00a03.",  # a letter and a stop inside a token
    "Mr. Smith No. 5 no. Five pp. 7 p.m. U.S. \"St. Paul\" Mc-St. 'Dr. Who' 5' 'Nr. 5. (Mr. X) St.",
    "I saw J. R. R. Tolkien vs. A. B. C. today. etc. and etc. And",
    'Und ,das", sagte er." Der 3. Mai, z.B. bzw. "so..." \u00abja\u00bb." ',
    "www.foo.com. U.S.-based.\" end.' end. ' ... .. .... a…b….c …",
    "he ‘n‘e’ „x‚ “‘a’”",
    "DOTMULTI .. DOTDOTMULTI",
    "THISISPROTECTED000 <b> </b> \x01 S\x01t. x",
    " leading and trailing. ",
    " ( ",
    "",
    " ",
]


def lines_of(folder: Path) -> Iterator[str]:
    for pattern in ("raw/**/*", "lm/**/*", "glue/**/*.tsv"):
        for file in sorted(filter(Path.is_file, folder.glob(pattern))):
            content = file.read_bytes()
            if file.suffix == ".bz2":
                content = bz2.decompress(content)
            yield from content.decode("utf-8", errors="replace").split("\n")
