"""Missing packages are named with the extra that brings them."""

import pytest

from launcher.errors import MachineError
from launcher.facts.software import require_modules


def test_what_is_installed_passes():
    require_modules(["json", "yaml"])


def test_what_is_missing_is_named():
    with pytest.raises(MachineError, match="not installed: no_such_module_x") as caught:
        require_modules(["json", "no_such_module_x"])
    assert "effilaunch[train]" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("absent", "hint"),
    [
        (["torch"], "pip install 'effilaunch[train]'"),
        (["torch", "trl"], "pip install 'effilaunch[train,dpo]'"),
        (["flash_attn"], "pip install flash-attn --no-build-isolation"),
        (
            ["peft", "flash_attn"],
            "pip install 'effilaunch[train]'; pip install flash-attn --no-build-isolation",
        ),
    ],
)
def test_the_hint_installs_what_is_missing(monkeypatch, absent, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    with pytest.raises(MachineError) as caught:
        require_modules(["yaml", *absent])
    (problem,) = caught.value.problems
    assert problem.code == "package-missing"
    assert problem.message == f"not installed: {', '.join(absent)}"
    assert problem.hint == hint
