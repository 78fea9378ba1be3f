"""Names that `diagnose` takes for removed: the installed packages do not have them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from launcher.knowledge.diagnose.versions import REMOVED


def test_removed_names_are_in_no_installed_package():
    there = []
    for package, names in REMOVED.items():
        defined = re.compile(
            rf"^(?:class|def) (?:{'|'.join(names)})\b|^(?:{'|'.join(names)}) *=", re.MULTILINE
        )
        folder = Path(str(find_spec(package).origin)).parent
        paths = [folder / "__init__.py"] if package == "torch" else folder.rglob("*.py")
        there += [str(path) for path in paths if defined.search(path.read_text("utf-8", errors="replace"))]
    assert there == []
    assert not (Path(str(find_spec("torch").origin)).parent / "_six.py").exists()
