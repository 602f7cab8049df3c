"""The one file of code: complete, alone, the same each time."""

import ast
import subprocess
import sys

import pytest
import torch
from exports import code_in, code_of_every_kind, export_custom, some_ids, tiny_model
from local_mean import LOCAL_MEAN

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.merge import merged_code, plan_as_json
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS
from lazyformer_fairseq.patterns.kinds import ENCODER, Kind, kinds, registered


@pytest.fixture(scope="module")
def code() -> str:
    """Of a pattern with every kind."""
    rows = [row.name for row in ATTENTION_KINDS]
    return merged_code([{"letter": kind.letter, "kinds": rows} for kind in kinds()])


def test_it_needs_torch_and_transformers_alone_and_no_name_is_there_twice(code):
    imported, defined = set(), []
    for node in ast.parse(code).body:
        inner = [each for each in ast.walk(node) if isinstance(each, (ast.Import, ast.ImportFrom))]
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            assert not inner
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
    assert {name for name in imported if name not in sys.stdlib_module_names} == {"torch", "transformers"}
    assert len(defined) == len(set(defined))
    # Other back ends, costs, a memory's kinds: what a model in transformers never calls.
    assert not {*defined} & {"count_memory", "Workload", "measure_spans", "RelativeAttention", "Recompute"}
    assert "custom_op" not in code and "count_memory" not in code
    assert set(code_of_every_kind().VARIANTS) == {row.name for row in ATTENTION_KINDS}


@pytest.mark.parametrize("command", ["format --check", "check --select F,E501"])
def test_the_file_is_as_tidy_as_our_own(command, code):
    ruff = [sys.executable, *f"-m ruff {command} --line-length 120 --isolated -".split()]
    found = subprocess.run(ruff, input=code, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stdout


def test_a_plan_says_who_reads_from_whom():
    plan = plan_as_json("s[window=2]f(lf)x2 s k - l")
    assert [place["giver"] for place in plan] == [None, None, 0, None, 0, None, None, 6, None, 6]
    assert plan[0]["settings"] == {"window": 2, "dilation": 1, "dilated_heads": 2, "global": 0}
    assert plan[0]["readers"] == ["distribution", "distribution"]
    assert plan[6]["kinds"] == [] and sorted(plan[6]["readers"]) == ["distribution", "keys and values"]


def test_it_is_the_same_each_time_a_pattern_needs_the_same():
    assert merged_code(plan_as_json("(s[entmax=1.5]f)x2")) == merged_code(plan_as_json("s[entmax=1.5]f"))


def test_a_kind_of_somebody_is_merged_from_its_own_module(tmp_path):
    with registered(LOCAL_MEAN), torch.no_grad():
        model = tiny_model(sublayer_pattern="sfmf")
        exported = code_in(export_custom(model, tmp_path)).LazyFormerForMaskedLM.from_pretrained(tmp_path)
        torch.testing.assert_close(exported(some_ids()).logits, model(some_ids())[0], atol=1e-5, rtol=1e-5)


def test_a_class_that_no_module_holds_is_refused_by_name():
    class Mine:
        pass

    mine = Kind("m", "mine", "", "", {ENCODER: Mine})
    with registered(mine), pytest.raises(UserError, match="mine \\(m\\) cannot be exported"):
        merged_code(plan_as_json("sfm"))


def test_a_file_for_other_sublayers_says_so(tmp_path):
    code = code_in(export_custom(tiny_model(sublayer_pattern="sf"), tmp_path))
    config = code.LazyFormerConfig(plan=plan_as_json("sflf"))
    with pytest.raises(ValueError, match="has no sublayers l: export the checkpoint again"):
        code.LazyFormerModel(config)
