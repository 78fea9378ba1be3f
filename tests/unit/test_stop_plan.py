"""A stop's length against the time that launchers leave for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from factories import BASE, facts, plan, recipe

from launcher.errors import RecipeError
from launcher.files.rank_status import AGREE_S
from launcher.plan.inputs import Pace
from launcher.planner.planner import make_plan
from launcher.planner.stopping import KILL_S, SETTLE_S, WAIT, WRITE_BYTES, kill_seconds, slow_step_word
from launcher.render.bundle import render

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
ZERO = {"sharding__engine": "deepspeed", "global_batch_size": 8}
STOP = "runtime.stop_seconds"


def stop_warnings(made):
    return [text for text in made.warnings if "a stop may take" in text or "that a stop may take" in text]


def test_a_stop_is_the_slowest_step_and_one_save(tmp_path):
    made = plan(tmp_path, "8xA100-80GB", FULL, sharding__zero_stage=3, global_batch_size=8)
    params = made.spec.params
    # bf16 weights, and fp32 master weights with AdamW's two moments.
    save = (2 + 12) * params / WRITE_BYTES + SETTLE_S
    assert made.time.seconds is not None
    assert made.at(STOP) == math.ceil(made.time.seconds[1] + save)
    assert "94.3 GB at an assumed 200 MB/s" in made.provenance[STOP].reason
    alone = plan(tmp_path, "8xA100-80GB", FULL, sharding__zero_stage=3, global_batch_size=8,
                 trainer__save_only_model=True)  # fmt: skip
    assert alone.at(STOP) < made.at(STOP) / 5


def test_a_step_that_is_not_predicted_is_not_counted_and_it_is_said(tmp_path):
    made = plan(tmp_path, "1x80GB")
    assert made.time.seconds is None
    assert "not counted" in made.provenance[STOP].reason
    assert SETTLE_S <= made.at(STOP) < KILL_S


def test_ranks_agree_about_a_stop_within_a_time_that_is_counted(tmp_path):
    """Of one process the step alone counts; of several what is longer."""
    save, found = 4.0, {}
    for hardware in ("1x80GB", "2x80GB"):
        for step in (0.5, 9.0):
            seen = replace(facts(hardware), pace=Pace(step=step, save=save))
            made = make_plan(recipe(tmp_path, BASE, global_batch_size=8), seen)
            found[hardware, step] = made.at(STOP)
    agreed = math.ceil(AGREE_S + save)
    assert found == {("1x80GB", 0.5): 5, ("1x80GB", 9.0): 13, ("2x80GB", 0.5): agreed, ("2x80GB", 9.0): 13}


def test_what_an_earlier_start_has_seen_is_counted_where_it_is_more(tmp_path):
    seen = replace(facts("1x80GB"), pace=Pace(step=45.0, save=20.0))
    made = make_plan(recipe(tmp_path), seen)
    assert made.at(STOP) == 65
    said = "a step of up to 45 s, which this run has seen, and a save of 20 s, which this run has seen"
    assert made.provenance[STOP].reason == said
    quick = replace(facts("8xA100-80GB"), pace=Pace(step=0.001, save=0.001))
    changes = {"sharding__zero_stage": 3, "global_batch_size": 8}
    assert make_plan(recipe(tmp_path, FULL, **changes), quick).at(STOP) == plan(
        tmp_path, "8xA100-80GB", FULL, **changes
    ).at(STOP)


def test_a_step_that_the_plan_did_not_foresee_is_told_once_it_is_known(tmp_path):
    made = plan(tmp_path, "2x80GB", **ZERO, launch__launcher="deepspeed", trainer__save_steps=7)
    assert made.time.seconds is None
    assert kill_seconds(made) == KILL_S
    assert slow_step_word(made, 5.0) == ""
    said = slow_step_word(made, 45.0)
    assert "a step takes 45 s here" in said
    assert "trainer.save_steps: 7" in said
    save = made.at(STOP) - int(AGREE_S)
    assert f"{45 + save + KILL_S} s before the end" in said
    waits = plan(tmp_path, "2x80GB", sharding__engine="ddp", global_batch_size=8)
    assert "45 s here" in slow_step_word(waits, 45.0), "torchrun's default is as short"
    text = BASE + "launch: {env: {TORCH_ELASTIC_SHUTDOWN_TIMEOUT: '90'}}\n"
    longer = plan(tmp_path, "2x80GB", text, sharding__engine="ddp", global_batch_size=8)
    assert (kill_seconds(longer), slow_step_word(longer, 45.0)) == (90.0, "")
    assert kill_seconds(plan(tmp_path, "1x80GB")) is None


def test_a_step_that_an_earlier_start_has_seen_is_not_told_anew(tmp_path):
    """It was counted: only what the stop takes beside it is the save."""
    loaded = recipe(tmp_path, BASE, sharding__engine="ddp", global_batch_size=8)
    seen = replace(facts("2x80GB"), pace=Pace(step=20.0, save=4.0))
    made = make_plan(loaded, seen)
    assert (made.at(STOP), kill_seconds(made)) == (24, KILL_S)
    assert slow_step_word(made, 20.0) == ""
    assert slow_step_word(made, 25.0) == ""
    assert "a step takes 27 s here, and a checkpoint about 4 s" in slow_step_word(made, 27.0)


def test_a_long_stop_under_zero_takes_a_launcher_that_waits(tmp_path):
    made = plan(tmp_path, "8xA100-80GB", FULL, **ZERO)
    seconds = made.at(STOP)
    assert seconds > KILL_S
    assert made.launch.launcher == "accelerate"
    assert f"{seconds} s" in made.provenance["launch.launcher"].reason
    bundle = render(made)
    assert bundle.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(seconds)
    assert bundle.command[2] == "launcher.train.loopback"
    assert stop_warnings(made) == []


def test_a_short_stop_keeps_the_launcher_and_the_environment(tmp_path):
    made = plan(tmp_path, "8xA100-80GB", BASE, **ZERO, data__max_length=128)
    assert made.at(STOP) <= KILL_S
    assert made.launch.launcher == "deepspeed"
    assert WAIT not in made.names
    assert stop_warnings(made) == []


def test_a_pinned_deepspeed_launcher_is_warned_of_with_what_is_lost_and_the_mend(tmp_path):
    made = plan(tmp_path, "8xA100-80GB", FULL, **ZERO, launch__launcher="deepspeed", trainer__save_steps=7)
    assert made.launch.launcher == "deepspeed"
    (said,) = stop_warnings(made)
    assert f"{made.at(STOP)} s" in said
    assert "trainer.save_steps: 7" in said
    assert "launch.launcher: auto" in said
    assert WAIT not in made.names, "nobody reads it there"


def test_over_several_machines_too_a_launcher_is_taken_that_waits(tmp_path):
    made = plan(tmp_path, "2x8xA100-80GB", FULL, **{**ZERO, "global_batch_size": 16})
    assert made.launch.launcher == "accelerate"
    assert made.at(WAIT) == str(made.at(STOP))
    assert stop_warnings(made) == []


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_torchrun_waits_for_other_engines_too(tmp_path, engine):
    made = plan(tmp_path, "8xH200-141GB", FULL, sharding__engine=engine, global_batch_size=8)
    assert made.launch.launcher == "accelerate"
    assert made.at(WAIT) == str(made.at(STOP))


def test_the_recipes_own_time_is_kept_and_a_short_one_is_warned_of(tmp_path):
    text = FULL + "launch: {env: {TORCH_ELASTIC_SHUTDOWN_TIMEOUT: '%s'}}\n"
    short = plan(tmp_path, "8xA100-80GB", text % 45, **ZERO)
    assert (short.at(WAIT), short.provenance[WAIT].source) == ("45", "recipe")
    (said,) = stop_warnings(short)
    assert "45 is less than" in said
    long = plan(tmp_path, "8xA100-80GB", text % 4000, **ZERO)
    assert long.at(WAIT) == "4000"
    assert stop_warnings(long) == []


def test_one_process_has_no_launcher_that_kills(tmp_path):
    made = plan(
        tmp_path, "1xH200-141GB", FULL, model__name_or_path="EleutherAI/pythia-1b", global_batch_size=8
    )
    assert made.launch.launcher == "python"
    assert made.at(STOP) > KILL_S
    assert WAIT not in made.names
    assert stop_warnings(made) == []


def test_upstreams_own_answer_to_signals_is_refused(tmp_path):
    """Its flag belongs to one process, and a run that goes on from its checkpoint is another one."""
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, trainer__enable_jit_checkpoint=True)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("owned-key", "trainer.enable_jit_checkpoint")
