"""The one file of code: complete, alone, the same each time."""

import ast
import subprocess
import sys

import pytest
from exports import code_in, export_custom, tiny_model

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export.merge import WIDTH, merge, merged_code, read_part
from lazyformer_fairseq.huggingface.export.plan import MODELLING, parts_of, plan_as_json
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS
from lazyformer_fairseq.patterns.kinds import ENCODER, Kind, registered

PARTS = [
    ".".join(path.relative_to(MODELLING).with_suffix("").parts)
    for path in sorted(MODELLING.rglob("*.py"))
    if path.name != "__init__.py"
]


def test_all_parts_together_need_torch_and_transformers_alone_and_no_name_is_there_twice():
    tree = ast.parse(merge(PARTS))
    imported, defined = set(), []
    for node in tree.body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
    assert {name for name in imported if name not in sys.stdlib_module_names} == {"torch", "transformers"}
    assert sorted(defined) == sorted(set(defined))
    assert not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree) if node not in tree.body)


def test_the_file_is_as_tidy_as_our_own():
    code = merge(PARTS)
    assert max(map(len, code.splitlines())) <= WIDTH
    ruff = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", str(WIDTH), "-"]
    assert subprocess.run(ruff, input=code, text=True, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_imports_first(name):
    body = ast.parse(read_part(name).body).body
    assert not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)
    assert body


def test_every_kind_has_its_part():
    for row in ATTENTION_KINDS:
        assert row.name in plan_as_json(f"s[{row.name}={EXAMPLES[row.name]}]f")[0]["kinds"]
        parts_of([{"letter": "s", "kinds": [row.name]}])
    assert parts_of(plan_as_json("sflk-")) == [
        "self_attention",
        "feed_forward",
        "lazy_attention",
        "shared_keys",
        "identity",
    ]


EXAMPLES = {
    **dict.fromkeys(("window", "strided", "fixed", "linformer", "span", "persistent", "buckets"), 8),
    "synthesizer": "dense",
    "entmax": 1.5,
}


def test_a_plan_says_who_reads_from_whom():
    plan = plan_as_json("s[window=2]f(lf)x2 s k - l")
    assert [place["giver"] for place in plan] == [None, None, 0, None, 0, None, None, 6, None, 6]
    assert plan[0]["settings"] == {"window": 2, "dilation": 1, "dilated_heads": 2, "global": 0}
    assert plan[0]["readers"] == ["distribution", "distribution"]
    assert plan[6]["kinds"] == [] and sorted(plan[6]["readers"]) == ["distribution", "keys and values"]


def test_only_what_a_pattern_needs_and_the_same_each_time():
    code = merged_code(plan_as_json("(s[entmax=1.5]f)x2"))
    assert "class Entmax(" in code and "class LazyAttention(" not in code and "class Window(" not in code
    assert code == merged_code(plan_as_json("s[entmax=1.5]f"))


def test_a_kind_of_somebody_is_refused_by_name():
    class Mine:
        pass

    with (
        registered(Kind("m", "mine", "", "", {ENCODER: Mine})),
        pytest.raises(UserError, match="mine \\(m\\) cannot be exported"),
    ):
        merged_code(plan_as_json("sfm"))


def test_a_file_for_other_sublayers_says_so(tmp_path):
    code = code_in(export_custom(tiny_model(sublayer_pattern="sf"), tmp_path))
    config = code.LazyFormerConfig(plan=plan_as_json("sflf"))
    with pytest.raises(ValueError, match="has no sublayers l: export the checkpoint again"):
        code.LazyFormerModel(config)
