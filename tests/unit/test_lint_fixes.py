"""`--fix`: the fixed text lints clean or says what is left, and keeps the rest as it is written."""

from __future__ import annotations

import json

import pytest
from every import every
from lint_cases import BROKEN

from launcher.knowledge.lint.check import applied, apply_fixes, lint_text
from launcher.knowledge.lint.document import TextEdit, read_json

MENDED = {
    "typo": (
        '{"train_batch_size": 8,\n  "gradient_cliping":  0.5}',
        '{"train_batch_size": 8,\n  "gradient_clipping":  0.5}',
    ),
    "text": ('{ "train_batch_size":"8" }', '{ "train_batch_size":8 }'),
    "exponent": (
        '{"train_batch_size": 8, "steps_per_print": 1e5}',
        '{"train_batch_size": 8, "steps_per_print": 100000}',
    ),
    "first removed": ('{"amp": {},\n "train_batch_size": 8}', '{"train_batch_size": 8}'),
    "last removed": ('{"train_batch_size": 8,\n "amp": {}\n}', '{"train_batch_size": 8\n}'),
    "bfloat16": (
        '{"train_batch_size": 8, "bfloat16": {"enabled": true}}',
        '{"train_batch_size": 8, "bf16": {"enabled": true}}',
    ),
    "bfloat16 text": (
        '{"train_batch_size": 8, "bfloat16": true}',
        '{"train_batch_size": 8, "bf16": {"enabled": true}}',
    ),
    "comments": (
        '{"train_batch_size": 8, // eight\n /* of */ "dump_state": True,}',
        '{"train_batch_size": 8, \n  "dump_state": true}',
    ),
    "offload": (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    ),
    "twice the same": (
        '{"train_batch_size": 8, "dump_state": true, "dump_state": true}',
        '{"train_batch_size": 8, "dump_state": true}',
    ),
    "steps": (
        '{"train_batch_size": 8, "scheduler": {"type": "StepLR", "params": {"step_size": "5e2"}}}',
        '{"train_batch_size": 8, "scheduler": {"type": "StepLR", "params": {"step_size": 500}}}',
    ),
    "longer": (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage3_reduce_scatter": true}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_scatter": true}}',
    ),
    "mistake behind a mistake": (
        '{"train_batch_size": 8, "zero_optimisation": {"stage": "2", "overlap_com": "true"}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}',
    ),
}


@pytest.mark.parametrize("name", MENDED)
def test_what_is_fixed(name):
    text, wanted = MENDED[name]
    assert apply_fixes(text, "ds.json") == (wanted, [])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}', "ds-fp16-and-bf16"),
        ('{"train_batch_size": 8, "dump_state": true, "dump_state": false}', "ds-duplicate-keys"),
        ('{"train_batch_size": 8, "sequence_parallel": {"size": 2}}', "ds-typo-toplevel"),
        ('{"train_batch_size": 8, "gradient_accumulation_dtype": "fp32"}', "ds-typo-toplevel"),
        ('{"train_batch_size": 8, "gradient_clippings": "norm"}', "ds-typo-toplevel"),
        ('{"train_batch_size": 8', "ds-json-syntax"),
        ('{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}', "ds-batch-mismatch"),
        ('{"train_batch_size": 8, "fp16": {"enabled": true, "min_loss_scale": 1e-10}}', "ds-float-bucket"),
        ('{"train_batch_size": 8, "amp": {"enabled": true}}', "ds-removed-key"),
        (
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
            "ds-stage2-offload-param",
        ),
        ('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "sub_group_size": 5}}', "ds-no-effect"),
        (
            '{"train_batch_size": 8, "bfloat16": {"enabled": true}, "bf16": {"enabled": false}}',
            "ds-bfloat16-alias",
        ),
        (
            '{"train_batch_size": 8, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": '
            '{"max_grad_norm": 1.0}}}',
            "ds-max-grad-norm-param",
        ),
        ("{}", "ds-no-batch-size"),
    ],
)
def test_what_has_two_readings_is_left(text, code):
    assert [finding.code for finding in apply_fixes(text, "ds.json")[1]] == [code]
    assert apply_fixes(text, "ds.json")[0] == text


STAGE_2 = '"train_batch_size": 8, "zero_optimization": {"stage": 2%s}'


def test_another_name_than_a_misspelt_one_is_not_changed():
    """None of these may become an active setting: DeepSpeed ignores or refuses them as they are."""
    for key, value in (
        ("eval_batch_size", 8), ("gradient_accumulation_fusion", 1), ("sparse_gradient", True),
        ("dump_steps", 10), ("steps_per_checkpoint", 100), ("fp8", {"enabled": True}),
        ("fp32", {"enabled": True}), ("gradient_clipping_norm", 1.0), ("optimizers", ["AdamW"]),
        ("gradient_cliping", True), ("steps_per_printt", {"every": 1}),
    ):  # fmt: skip
        text = "{{{}, {}}}".format(STAGE_2 % "", f'"{key}": {json.dumps(value)}')
        fixed, left = apply_fixes(text, "ds.json")
        assert (fixed, [f.path for f in left]) == (text, [key]), key
    for below in (', "reduce_scatter_size": 100', ', "gpu_offload": true'):
        text = "{%s}" % (STAGE_2 % below)
        assert apply_fixes(text, "ds.json")[0] == text, below
    text = "{{{}, {}}}".format(STAGE_2 % "", '"fp16": {"enabled": true, "max_loss_scale": 2}')
    assert apply_fixes(text, "ds.json")[0] == text
    text = '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"beta": 0.9, "epsilon": 1}}}'
    assert apply_fixes(text, "ds.json")[0] == text
    text = '{"train_batch_size": 8, "zero_optimizer": {"stage": 2}}'
    assert apply_fixes(text, "ds.json")[0] == text


def test_another_optimizer_or_schedule_than_a_misspelt_one_is_not_changed():
    for block, names in (
        ("optimizer", "Adan AdamP QAdam LionW SGDW AdmaW"),
        ("scheduler", "WarmupLinearLR WarmupStableDecayLR"),
    ):
        for name in names.split():
            text = f'{{"train_batch_size": 8, "{block}": {{"type": "{name}"}}}}'
            fixed, left = apply_fixes(text, "ds.json")
            assert (fixed, [f.code for f in left]) == (text, [f"ds-{block}-type"]), name
            assert "did you mean" not in str(left[0].hint), name
    text = '{"train_batch_size": 8, "optimizer": {"type": "%s"}}'
    assert apply_fixes(text % "sgd", "ds.json")[0] == text % "SGD"


def test_of_several_duplicates_the_value_that_is_read_stays():
    for values in ("8 16 8", "8 8 16", "16 8 8", "8 8 8", "1 true"):
        text = "{{{}}}".format(", ".join(f'"steps_per_print": {value}' for value in values.split()))
        fixed, left = apply_fixes(text, "ds.json")
        assert repr(json.loads(fixed)) == repr(json.loads(text)), values
        assert any(f.code == "ds-duplicate-keys" for f in left) == (values != "8 8 8"), values


def test_hints_name_what_to_write():
    """The hint of one finding each: of numbers as Python writes them, of a blank, of keys of other tools."""
    for value, wanted in (
        ("+8", "write 8"), (".5", "write 0.5"), ("-.5", "write -0.5"), ("5.e8", "write 5e8"),
        ("5_000_000", "write 5000000"), ("02", "write 2"), ("1.", "write 1"), ("\xa08", "remove it"),
    ):  # fmt: skip
        (found,) = lint_text(f'{{"train_batch_size": 8, "gradient_clipping": {value}}}', "ds.json")
        assert (found.code, found.column, found.hint) == ("ds-json-syntax", 46, wanted), value
        assert value.strip("\xa08") in found.message, value
        assert not wanted.startswith("write") or json.loads(wanted.split()[1]) == float(value), value
    for text, where, wanted in (
        ('"fp16": {"enabled": true, "fp16": true}', "fp16.fp16", "remove it"),
        ('"seed": 1', "seed", "remove it"),
        ('"stage": 2', "stage", "move it to `zero_optimization`"),
        ('"optimizer": {"type": "OneBitAdam"}', "optimizer.type", "1-bit optimizers were removed"),
    ):
        (found,) = lint_text(f'{{"train_batch_size": 8, {text}}}', "ds.json")
        assert (found.path, wanted in found.hint) == (where, True), (text, found.hint)


def test_a_text_that_is_not_json_is_read_on_and_not_changed():
    text = """{"train_batch_size": 8
 "gradient_cliping": 1.0, 'dump_state': true,
 "fp16": {"enabled": truth, "overlap": 1},
 "zero_optimization": {"stage": 2, "amp": }, "bf_16": {"enabled": True"""
    found = [(f.code, f.line, f.column) for f in lint_text(text, "ds.json")]
    assert found == [
        ("ds-json-syntax", 2, 2), ("ds-typo-toplevel", 2, 2), ("ds-json-syntax", 2, 27),
        ("ds-json-syntax", 3, 22), ("ds-typo-nested", 3, 29), ("ds-typo-nested", 4, 36),
        ("ds-json-syntax", 4, 43), ("ds-typo-toplevel", 4, 46), ("ds-json-word", 4, 67),
        ("ds-json-syntax", 4, 71),
    ]  # fmt: skip
    assert apply_fixes(text, "ds.json")[0] == text
    whole = read_json("# note\n" + text, "ds.json")
    assert (whole.root, [f.line for f in whole.findings]) == (None, [3]), "for those who need all of it"


@every("name", BROKEN)
def test_mending_never_makes_it_worse(name):
    text = BROKEN[name][0]
    better, left = apply_fixes(text, "ds.json")
    assert left == lint_text(better, "ds.json")
    assert len(left) <= len(lint_text(text, "ds.json"))
    if better != text and not left:
        json.loads(better)
    assert apply_fixes(better, "ds.json")[0] == better


def test_edits_that_touch_are_made_one_after_the_other():
    assert applied("abcdef", [[TextEdit(0, 2)], [TextEdit(1, 3)], [TextEdit(4, 5, "X")]]) == "cdXf"
