"""Reward functions and sampling of GRPO in other tools' files: the sections `reward` and `generation`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.importing.conversions import To, as_bool, as_number
from launcher.importing.key_tables import Keys, Peer
from launcher.importing.reading import Effect, shown
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


def _number(value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise ValueError("a number")
    return number


def _whole(value: Any) -> int:
    number = as_number(value)
    if number is None or number != int(number):
        raise ValueError("a whole number")
    return int(number)


GENERATION_KEYS: Keys = {
    **{
        name: To(f"generation.{name}", _whole)
        for name in ("num_generations", "max_completion_length", "top_k")
    },
    **{
        name: To(f"generation.{name}", _number)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    },
}


def take_rewards(peer: Peer, functions: Sequence[Any], weights: Any, known: Iterable[str] = ()) -> None:
    """Take `reward` from names of functions: a module's (`rewards.score`), or of trl's own.

    weights: the list beside them, None for 1 each. known: which of `OF_TRL` the tool takes by name alone.
    """
    if not functions:
        return  # which is reported
    given = [1.0] * len(functions) if weights is None else weights
    weighted = given if isinstance(given, list) else [given]
    if len(weighted) != len(functions):
        message = f"has {len(weighted)} entries for {len(functions)} reward functions"
        peer.refuse("reward_weights", message, "give one weight for each function")
        return
    entries, lines = [], []
    for name, weight in zip(map(str, functions), weighted, strict=True):
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
        number = as_number(weight)
        if number is None:
            peer.refuse("reward_weights", f"holds {shown(weight)}, expected a number")
        entries.append(
            {"function": function, **({} if number in (None, 1) else {"weight": float(number or 0)})}
        )
    if lines:
        text = '"""Reward functions of trl\'s."""\n\n' + "\n".join(dict.fromkeys(lines)) + "\n"
        peer.reading.texts[REWARDS] = text
    if entries:
        peer.take(KEY, entries, "reward_funcs", "reward_weights")


def take_backend(peer: Peer, default_mode: str | None) -> None:
    """`use_vllm` and `vllm_mode`. default_mode: of the tool; None where it differs between versions."""
    mode = peer.get("vllm_mode") or default_mode
    if not peer.switch("use_vllm"):
        return
    if mode in ("colocate", "server"):
        peer.take("generation.backend", f"vllm-{mode}", "use_vllm", "vllm_mode")
    elif mode is None:
        hint = "write vllm-colocate or vllm-server"
        peer.needs(
            "generation.backend", "use_vllm", "the default of vllm_mode depends on trl's version", hint
        )
    else:
        peer.refuse("vllm_mode", f"is {shown(mode)}, expected colocate or server")


def take_scale(peer: Peer) -> None:
    """`scale_rewards`, a switch in older versions: true is group, false is none."""
    value = peer.get("scale_rewards")
    switch = as_bool(value)
    if switch is None and value is not None:
        peer.argument("scale_rewards")
    elif switch is not None:
        peer.take("trainer.scale_rewards", "group" if switch else "none", "scale_rewards")


def take_batches(peer: Peer) -> None:
    """`generation_batch_size`: completions of one generation over all ranks, whose number no file has."""
    if peer.get("generation_batch_size") is not None:
        hint = "write trainer.steps_per_generation"
        reason = "it is steps_per_generation x micro-batch x ranks, and the ranks are not known"
        peer.drop("generation_batch_size", Effect.TRAINING, reason, hint)


def needs_length(peer: Peer, said: str) -> None:
    """No tool limits a prompt with its completion; a recipe does."""
    if "data.max_length" not in peer.reading.taken:
        longest = peer.reading.value("generation.max_completion_length") or 512
        hint = f"write the longest prompt's length plus {longest}"
        peer.reading.needs("data.max_length", None, f"{said} does not limit prompts", hint)
