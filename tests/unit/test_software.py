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
