"""A loaded recipe written out as one file: what a job runs that starts after the recipe was edited.

Parents, shipped recipes and overrides are merged, paths are absolute; `${ENV:NAME}` stays under `trainer` and
`launch.env`, where it is resolved in the workers.
"""

from __future__ import annotations

from typing import Any

import yaml

from launcher.facts.hardware import Hardware
from launcher.recipe.loading import LoadedRecipe

_HEAD = """\
# {recipe}
# as it was when its job was submitted, with its parents and overrides; later edits of it change nothing here.
"""


class _Dumper(yaml.SafeDumper):
    """Every text between quotes: what looks like a number or a date stays a text for every reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(dumper: _Dumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _quoted)


def snapshot(loaded: LoadedRecipe, hardware: Hardware) -> str:
    """The recipe as YAML. hardware: what it is planned for, be it by --on."""
    data: dict[str, Any] = loaded.recipe.model_dump(exclude_unset=True)
    data["hardware"] = {
        "num_nodes": hardware.num_nodes,
        "devices_per_node": hardware.devices_per_node,
        "device": hardware.device,
    }
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    name = str(loaded.path.absolute())
    return _HEAD.format(recipe=name if name.isprintable() else ascii(name)) + text
