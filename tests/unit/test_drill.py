"""When a fault is injected, how a run must end, and when its losses continue: the pure part of `drill`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from every import every

from launcher.errors import RecipeError
from launcher.files.shipped import shipped_names
from launcher.lab.drill import (
    FAULTS,
    TOLERANCE,
    Comparison,
    EndedProcess,
    bad_checkpoint,
    bad_ending,
    bad_losses,
    choose_faults,
    compare,
    drill_overrides,
    drill_text,
    fault_line,
    tolerance_of,
)
from launcher.planner.tiny import tiny_recipe
from launcher.recipe.loading import load_recipe

BY_ID = {fault.id: fault for fault in FAULTS}
STRAIGHT = {1: 3.0, 2: 2.5, 3: 2.25, 4: 2.0}


@every("steps", range(6, 60))
def test_a_fault_between_steps_comes_between_two_saves(steps):
    save_steps = steps // 3
    for fault in FAULTS:
        at = fault.step(save_steps)
        assert 0 < at < steps
        assert (at % save_steps == 0) == fault.in_save


def test_too_few_steps_are_refused():
    with pytest.raises(RecipeError, match="at least 6"):
        drill_overrides(load_recipe("smoke").recipe, 5)


def test_only_names_faults_in_any_order():
    assert [fault.id for fault in choose_faults("kill-save, terminate")] == ["terminate", "kill-save"]
    assert choose_faults(None) == FAULTS
    with pytest.raises(RecipeError, match="did you mean kill-rank"):
        choose_faults("kill-rnak")
    with pytest.raises(RecipeError, match="the faults are terminate"):
        choose_faults(",")


CAUSES = {
    "terminate": "SIGTERM: the run was stopped at step 7 (checkpoint-7)",
    "kill-rank": "rank 1 was killed by SIGKILL",
    "kill-all": "rank 0 was killed by SIGKILL",
    "disk-full": "the disk is full",
    "kill-save": "rank 0 was killed by SIGKILL",
}


def ending(name: str, *, cause=None, injected=True, seconds=12.0, stop_s=0.0, **changes) -> str | None:
    """The verdict on a good ending of this fault, with changes."""
    answer = {"errors": [{"message": CAUSES[name] if cause is None else cause}]}
    fields = {"code": BY_ID[name].code, "left": 0, **changes}
    ended = EndedProcess(answer=answer, seconds=seconds, ended_at=0.0, **fields)
    return bad_ending(BY_ID[name], ended, injected, seconds, stop_s)


@pytest.mark.parametrize("name", BY_ID)
def test_an_ending_as_it_should_be(name):
    assert ending(name) is None


WRONG = [
    ({"code": None}, ["did not end"]),
    ({"injected": False, "code": 0}, ["not injected", "status 0"]),
    ({"code": 70}, ["status 70"]),
    ({"left": 2}, ["2 processes"]),
    ({"seconds": 61.0}, ["61 s", "60 s"]),
    ({"cause": ""}, ["none"]),
    ({"cause": "the loss was not finite"}, ["the loss was not finite"]),
]


@pytest.mark.parametrize("name", BY_ID)
@pytest.mark.parametrize(("change", "terms"), WRONG, ids=lambda value: str(value)[:24])
def test_a_wrong_ending_is_described(name, change, terms):
    wrong = ending(name, **change) or ""
    assert [term for term in terms if term not in wrong] == []


def test_only_a_stopped_run_has_the_time_of_a_save():
    for name in BY_ID:
        assert (ending(name, seconds=100.0, stop_s=45.0) is None) == (name == "terminate")


def test_the_checkpoint_that_must_be_left():
    assert bad_checkpoint(BY_ID["kill-save"], 4, 4) is None
    assert "of step 8, expected 4" in (bad_checkpoint(BY_ID["kill-save"], 4, 8) or "")
    assert bad_checkpoint(BY_ID["kill-all"], 4, None)
    for step, good in ((4, False), (6, True), (7, True)):
        assert (bad_checkpoint(BY_ID["terminate"], 4, step) is None) == good, step


def test_losses_are_compared_step_by_step():
    assert bad_losses(compare(STRAIGHT, STRAIGHT), 0.0) is None
    last = math.nextafter(2.25, 3.0)
    found = compare({**STRAIGHT, 3: last}, STRAIGHT)
    assert (found.steps, found.worst, found.missing) == (4, 3, ())
    assert "step 3: losses differ by 4.44e-16" in bad_losses(found, 0.0)
    assert bad_losses(found, 1e-9) is None


def test_a_step_that_is_missing_or_too_many_is_no_success():
    short = {step: loss for step, loss in STRAIGHT.items() if step != 2}
    assert bad_losses(compare(short, STRAIGHT), 1.0) == "steps 2 are not in both runs"
    assert bad_losses(compare({**STRAIGHT, 5: 1.0}, STRAIGHT), 1.0) == "steps 5 are not in both runs"
    assert bad_losses(compare({}, {}), 1.0) == "there is nothing to compare"


def test_a_loss_that_is_not_finite_equals_another_such_one_alone():
    assert bad_losses(compare({1: None}, {1: None}), 0.0) is None
    assert bad_losses(compare({1: None, 2: 1.0}, {1: 3.0, 2: 9.0}), 100.0).startswith("step 1:")


def test_the_tolerance_is_what_two_unharmed_runs_need():
    assert tolerance_of([STRAIGHT]) == 0.0
    assert tolerance_of([STRAIGHT, STRAIGHT]) == 0.0
    apart = {**STRAIGHT, 4: 2.0 + 2**-10}
    assert tolerance_of([STRAIGHT, apart]) == TOLERANCE * 2**-10


def record(**changes):
    return {
        "id": "kill-all", "title": "SIGKILL of all ranks", "status": "passed", "reason": None, "struck": 6,
        "exit_code": 5, "seconds": 3.25, "left": 0, "cause": "rank 0 was killed by SIGKILL", "checkpoint": 4,
        "resumed_at": 4, "compared": 12, "difference": 0.0, "run_dir": "/d/03-kill-all", **changes,
    }  # fmt: skip


def test_the_table_shows_what_was_measured_and_why_a_fault_failed():
    wrong = {"status": "failed", "exit_code": None, "reason": "the run did not end"}
    failed = record(id="terminate", title="SIGTERM to the run", **wrong)
    data = {
        "recipe": "r.yaml", "hardware": "2xcpu", "steps": 12, "save_steps": 4,
        "reference": {"runs": 1, "seconds": 9.0, "spread": None, "tolerance": 0.0},
        "faults": [record(), failed],
    }  # fmt: skip
    text = drill_text(data, Path("/d"))
    (row,) = [line for line in text.splitlines() if line.strip().startswith("SIGKILL of all ranks")]
    cells = re.split(r"  +", row.strip())
    assert cells[1:] == ["exit code 5", "3.2 s", "step 4", "step 4", "12", "nothing", "passed"]
    assert "terminate: the run did not end" in text
    assert "bit-identical" in text
    line = fault_line(record())
    assert [term for term in ("3.2 s", "step 4", "12 losses", "nothing") if term not in line] == []
    data["reference"] |= {"runs": 2, "spread": 0.25, "tolerance": 2.0}
    text = drill_text(data, Path("/d"))
    assert "at most 2;" in text
    assert "0.25" in text


def test_the_worst_step_is_the_one_that_is_told():
    found = compare({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.5, 2: 2.25, 3: 3.0})
    assert found == Comparison(3, 0.5, 1, ())


@every("name", [name for name in shipped_names() if not name.startswith("_")])
def test_every_shipped_recipe_can_be_shortened_for_a_drill(name):
    recipe = load_recipe(name).recipe
    sets = drill_overrides(recipe, 9)
    short = load_recipe(name, sets).recipe
    assert (short.trainer["max_steps"], short.trainer["save_steps"]) == (9, 3)
    assert (short.trainer["save_strategy"], short.trainer["logging_steps"]) == ("steps", 1)
    assert "num_train_epochs" not in short.trainer
    assert (short.early_stopping, short.launch.max_restarts, short.on_oom) == (None, 0, "fail")
    if recipe.trainer.get("load_best_model_at_end"):
        assert (short.trainer["eval_strategy"], short.trainer["eval_steps"]) == ("steps", 3)
    changed = {key for key in short.trainer if short.trainer[key] != recipe.trainer.get(key)}
    assert changed <= {
        "max_steps", "save_steps", "save_strategy", "logging_steps", "logging_strategy", "report_to",
        "eval_strategy", "eval_steps",
    }, "everything else is as the recipe says"  # fmt: skip


def test_a_drill_sends_nothing_to_the_hub():
    asked = ["trainer.push_to_hub=true", "trainer.hub_model_id=me/mine"]
    sets = [*asked, *drill_overrides(load_recipe("smoke", asked).recipe, 9)]
    assert load_recipe("smoke", sets).recipe.trainer["push_to_hub"] is False


def test_checkpoints_of_weights_alone_are_refused():
    recipe = load_recipe("smoke", ["trainer.save_only_model=true"]).recipe
    with pytest.raises(RecipeError, match="save_only_model"):
        drill_overrides(recipe, 9)


def test_a_rehearsal_is_as_long_as_the_command_line_says():
    """The recipe's own length is shortened; one that is asked for beside `--tiny` is meant."""
    sets = drill_overrides(load_recipe("smoke").recipe, 9)
    tiny = tiny_recipe(load_recipe("smoke", sets), {"hidden_size": 576}).recipe.trainer
    assert (tiny["max_steps"], tiny["save_steps"]) == (9, 3)
    plain = tiny_recipe(load_recipe("smoke"), {"hidden_size": 576}).recipe.trainer
    assert (plain["max_steps"], plain["save_steps"], plain["logging_steps"]) == (4, 2, 1)
