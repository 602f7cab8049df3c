"""Code that reads: the package's density stays below bars, which only ever fall."""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest
from helpers import syntax_tree

import lazyformer_fairseq

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
CLAUSES = ("What ", "Of ", "Who ", "Whether ", "Which ", "How ", "Those ", "That ", "Where ", "As ")
BARS = {
    "tokens per line of code": 8.5,
    "tokens per statement": 10.2,
    "conditional expressions per 1,000 lines of code": 5,
    "tuple assignments per 1,000 lines of code": 0.3,
    "docstrings that begin with a clause, %": 0,
    "comments that stop the formatter": 0,
}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions split f-strings into several tokens")
def test_the_package_is_not_packed():
    tokens = lines = statements = conditionals = tuples = docstrings = clauses = unformatted = 0
    for path in Path(lazyformer_fairseq.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        unformatted += text.count("# fmt:")
        lines_of_docstrings: set[int] = set()
        for node in ast.walk(syntax_tree(path)):
            statements += isinstance(node, ast.stmt)
            conditionals += isinstance(node, ast.IfExp)
            if isinstance(node, ast.Assign):
                tuples += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            has_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, has_docstring) and (docstring := ast.get_docstring(node)):
                lines_of_docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
                docstrings += 1
                clauses += docstring.startswith(CLAUSES)

        lines_of_code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in LAYOUT and token.start[0] not in lines_of_docstrings:
                tokens += 1
                lines_of_code |= set(range(token.start[0], token.end[0] + 1))
        lines += len(lines_of_code)

    found = (
        tokens / lines,
        tokens / statements,
        1000 * conditionals / lines,
        1000 * tuples / lines,
        100 * clauses / docstrings,
        unformatted,
    )
    too_high = {name: value for (name, bar), value in zip(BARS.items(), found, strict=True) if value > bar}
    assert not too_high, f"bars: {BARS}"
