"""Reward functions and sampling of GRPO in other tools' files: the sections `reward` and `generation`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from launcher.importing.conversions import Number, To, as_bool, as_number, listed, number
from launcher.importing.key_tables import Keys, Peer
from launcher.importing.reading import shown
from launcher.tasks.grpo import KEY

REWARDS = "_rewards.py"
"""Ending of the name of a file that imports reward functions of trl's, after the recipe's name."""
OF_TRL: Mapping[str, str] = {
    "accuracy_reward": "from trl.rewards import accuracy_reward",
    "reasoning_accuracy_reward": "from trl.rewards import reasoning_accuracy_reward",
    "think_format_reward": "from trl.rewards import think_format_reward",
    "get_soft_overlong_punishment": (
        "from trl import rewards\n\n"
        "get_soft_overlong_punishment = rewards.get_soft_overlong_punishment(\n"
        "    max_completion_len=1280, soft_punish_cache=256\n)"
    ),
}
"""Name in `trl grpo --reward_funcs` -> the line that has it (trl 1.16, scripts/grpo.py)."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_WHOLE = ("num_generations", "max_completion_length", "top_k")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty")
GENERATION_KEYS: Keys = {
    **{name: To(f"generation.{name}", Number("a whole number")) for name in _WHOLE},
    **{name: To(f"generation.{name}", number) for name in _REAL},
}


def take_rollouts(
    peer: Peer, known: Iterable[str] = (), mode: str | None = None, sampling: Keys = MappingProxyType({})
) -> bool:
    """Take `reward` from `reward_funcs`, and `generation`; whether there are functions.

    known: which of `OF_TRL` the tool takes by name alone. mode: its default of vllm_mode; None where that
    differs between versions. sampling: keys beside these.
    """
    peer.leave(peer.tool.left["rollouts"])
    functions, given = peer.listed("reward_funcs"), peer.get("reward_weights")
    weights = [1.0] * len(functions) if given is None else listed(given)
    if functions and len(weights) != len(functions):
        message = f"has {len(weights)} entries for {len(functions)} reward functions"
        peer.refuse("reward_weights", message, "give one weight for each function")
    else:
        _take_functions(peer, [*zip(functions, weights, strict=False)], known)
    peer.take_keys(sampling)
    _take_backend(peer, peer.get("vllm_mode") or mode)
    return bool(functions)


def _take_functions(peer: Peer, functions: Sequence[tuple[str, Any]], known: Iterable[str]) -> None:
    """functions: a module's (`rewards.score`) or of trl's own, with the weight of each."""
    entries, lines = [], []
    for name, weight in functions:
        if name in known:
            lines.append(OF_TRL[name])
            function = f"{REWARDS}:{name}"
        elif _DOTTED.fullmatch(name):
            module, _, inner = name.rpartition(".")
            function = f"{module.replace('.', '/')}.py:{inner}"
        else:
            message = f"holds {shown(name)}, expected a module's function (rewards.score)"
            message += f" or one of {', '.join(known)}" if known else ""
            hint = "write a function; instead of a reward model, one that scores completions with it"
            peer.refuse("reward_funcs", message, hint)
            continue
        share = as_number(weight)
        if share is None:
            peer.refuse("reward_weights", f"holds {shown(weight)}, expected a number")
        entries.append(
            {"function": function, **({} if share in (None, 1) else {"weight": float(share or 0)})}
        )
    if lines:
        text = '"""Reward functions of trl\'s."""\n\n' + "\n".join(dict.fromkeys(lines)) + "\n"
        peer.reading.texts[REWARDS] = text
    if entries:
        peer.take(KEY, entries, "reward_funcs", "reward_weights")


def _take_backend(peer: Peer, mode: Any) -> None:
    if not peer.switch("use_vllm"):
        return
    if mode in ("colocate", "server"):
        peer.take("generation.backend", f"vllm-{mode}", "use_vllm", "vllm_mode")
    elif mode is None:
        reason, hint = (
            "the default of vllm_mode depends on trl's version",
            "write vllm-colocate or vllm-server",
        )
        peer.needs("generation.backend", "use_vllm", reason, hint)
    else:
        peer.refuse("vllm_mode", f"is {shown(mode)}, expected colocate or server")


def take_scale(peer: Peer) -> None:
    """`scale_rewards`, a switch in older versions: true is group, false is none."""
    switch = as_bool(peer.get("scale_rewards"))
    if switch is None:
        peer.argument("scale_rewards")
    else:
        peer.take("trainer.scale_rewards", "group" if switch else "none", "scale_rewards")


def needs_length(peer: Peer, said: str) -> None:
    """No tool limits a prompt with its completion; a recipe does."""
    if "data.max_length" not in peer.reading.taken:
        longest = peer.reading.value("generation.max_completion_length") or 512
        hint = f"write the longest prompt's length plus {longest}"
        peer.reading.needs("data.max_length", None, f"{said} does not limit prompts", hint)
