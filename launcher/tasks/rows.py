"""Row formats: the fields that a row of each must have and may have."""

from __future__ import annotations

from collections.abc import Mapping

FORMAT_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "instruction": (("instruction", "output"), ("input",)),
    "prompt-completion": (("prompt", "completion"), ()),
    "chat": (("messages",), ("tools",)),
    "preference": (("chosen", "rejected"), ("prompt", "tools")),
    "classification": (("text", "label"), ("text_pair",)),
    "image": (("image", "label"), ()),
}
"""Format of rows -> (fields that it must have, fields that it may have)."""
