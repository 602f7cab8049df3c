"""The table of kinds is the one door: nothing outside it and the kinds' own files asks for a letter."""

import ast

from helpers import ROOT

from lazyformer_fairseq.patterns.kinds import kinds

# Where a letter is no kind's: "s" ends an English plural, "k" is short for keys.
NO_KINDS = {"data/text/library_recipe.py", "data/text/moses.py", "huggingface/families.py"}
NO_PATTERNS = {"lr", "lrs", "fr"}  # learning rates, French
OF_KINDS = ("modules/sublayers/",)  # one file per kind


def letters_asked_for(tree: ast.AST, letters: set[str]) -> list[int]:
    """Lines that compare with a kind's letter, look one up, count one, or go through several."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args if node.func.attr in {"count", "index", "get", "replace", "find", "pop"} else []
        elif isinstance(node, (ast.For, ast.comprehension)):
            asked = [node.iter]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        else:
            continue
        for part in asked:
            parts = part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]
            words = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if any(word and word not in NO_PATTERNS and set(word) <= letters for word in words):
                found.append(part.lineno)
    return found


def test_nothing_outside_the_table_and_the_kinds_own_files_asks_for_a_letter():
    package = ROOT / "lazyformer_fairseq"
    letters = {kind.letter for kind in kinds()} - {"-"}
    offenders = []
    for path in package.rglob("*.py"):
        place = path.relative_to(package).as_posix()
        if place == "patterns/kinds.py" or place.startswith(OF_KINDS) or place in NO_KINDS:
            continue
        lines = letters_asked_for(ast.parse(path.read_text(encoding="utf-8")), letters)
        offenders += [f"{place}:{line}" for line in lines]
    assert offenders == []


def test_that_test_finds_each_way_to_ask():
    code = """kind == 's'; 'l' in kinds; table['f']; pattern.count('s'); [k for k in 'slf']; kind in ('s', 'l')"""
    for each in (*code.split("; "), "match k:\n case 's': pass"):
        assert letters_asked_for(ast.parse(each), {"s", "l", "f"}), each
