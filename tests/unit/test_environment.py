"""The environment is mended before the start: nothing that is set is replaced, and all of it is told."""

from __future__ import annotations

import pytest

from launcher.execute.environment import mend_environment

KEY = {"WANDB_API_KEY": "k" * 40}


@pytest.fixture
def home(tmp_path):
    return {"HOME": str(tmp_path)}


@pytest.mark.parametrize("report_to", ["wandb", ["wandb"], ["tensorboard", "wandb"], "all"])
def test_without_a_login_wandb_logs_offline(home, report_to):
    added, notes = mend_environment(home, report_to)
    assert added == {"WANDB_MODE": "offline"}
    assert len(notes) == 1
    assert "WANDB_MODE=offline" in notes[0]


@pytest.mark.parametrize("report_to", ["none", None, [], ["tensorboard"]])
def test_who_does_not_report_to_wandb_needs_no_login(home, report_to):
    assert mend_environment(home, report_to) == ({}, [])


@pytest.mark.parametrize(
    "said", [KEY, {"WANDB_MODE": "disabled"}, {"WANDB_MODE": "online"}, {"WANDB_IDENTITY_TOKEN_FILE": "/t"}]
)
def test_a_login_or_a_mode_of_ones_own_stays(home, said):
    assert mend_environment({**home, **said}, "wandb") == ({}, [])


def test_a_login_in_the_netrc_file_counts(home, tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "k" * 40 + "\n")
    assert mend_environment(home, "wandb") == ({}, [])
    other = {**home, "WANDB_BASE_URL": "https://wandb.example.org"}
    assert mend_environment(other, "wandb")[0] == {"WANDB_MODE": "offline"}


@pytest.mark.parametrize(("value", "told"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_a_variable_that_nobody_reads_any_more_is_told(home, value, told):
    environ = {**home, **KEY, "WANDB_DISABLED": value}
    added, notes = mend_environment(environ, "wandb")
    assert added == {}
    assert any("WANDB_DISABLED" in note for note in notes) is told
    assert mend_environment(environ, "none") == ({}, [])


def test_the_old_cache_variable_is_mapped_to_the_new_one(home):
    added, notes = mend_environment({**home, "TRANSFORMERS_CACHE": "/big/models"}, "none")
    assert added == {"HF_HUB_CACHE": "/big/models"}
    assert "TRANSFORMERS_CACHE" in notes[0]


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_new_cache_variable_wins_over_the_old_one(home, name):
    environ = {**home, "TRANSFORMERS_CACHE": "/big/models", name: "/other"}
    assert mend_environment(environ, "none") == ({}, [])
