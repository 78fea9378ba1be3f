"""Checks of packages, the Hub, and logins."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.knowledge.doctor.check import Check, Verdict, fail, needed, numbers, ok, skip, warn
from launcher.knowledge.doctor.needs import needed_modules, reports_to
from launcher.machine.machine_facts import Machine
from launcher.machine.software import RANGES, TESTED, install_hint, outside_range
from launcher.plan.plan import Plan
from launcher.recipe.data_paths import is_loaded_hub_id

_ALWAYS = ("packaging", "pydantic", "pyyaml")
_PACKAGE_OF = {"PIL": "pillow"}
"""Module -> package, where the names differ."""


def versions(machine: Machine, plan: Plan | None) -> Verdict:
    """Packages against the supported ranges and the tested versions."""
    modules = [] if plan is None else needed_modules(plan)
    installed = machine.software.installed
    wanted = [*_ALWAYS, *(_PACKAGE_OF.get(module, module) for module in modules)]
    known = len(TESTED.keys() & installed.keys())
    found = f"Python {machine.software.python}, {known} of {len(TESTED)} known packages"
    missing = [name for name in wanted if name not in installed]
    if missing:
        return fail(found, f"not installed: {', '.join(missing)}", install_hint(missing))
    wrong = {
        name: f"{name} {version} (supported: {name}{limits})"
        for name, version in installed.items()
        if (limits := outside_range(name, version))
    }
    if wrong:
        used = [text for name, text in wrong.items() if name in wanted]
        hint = "pip install 'effilaunch[train]' installs supported versions"
        return needed(bool(used), found, f"out of range: {', '.join(used or wrong.values())}", hint)
    absent = [name for name in RANGES if name not in installed]
    newer = [
        f"{name} {installed[name]} (tested: {tested})"
        for name, tested in TESTED.items()
        if name in installed and numbers(installed[name])[:2] > numbers(tested)[:2]
    ]
    if newer:
        return ok(found, f"newer than tested: {', '.join(newer)}")
    return ok(found, f"not installed: {', '.join(absent)}" if absent else "")


def hub(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether the model is in the cache or can be downloaded."""
    network, model = machine.network, machine.hub_model
    found = {"offline": "offline by HF_HUB_OFFLINE"}.get(network.hub, f"{network.endpoint} is {network.hub}")
    if plan is not None and model is None:
        return _data_from_hub(plan, found, network.hub)
    if plan is None or model is None:
        if network.hub == "unreachable":
            message = "models and data must be in folders or in the cache"
            return warn(found, message, "set HF_HUB_OFFLINE=1 to avoid timeouts")
        return ok(found)
    if model.cached:
        return ok(found, f"{model.name} is in the cache")
    if network.hub != "reachable":
        hint = "download it on a machine with network (`hf download`), or use a folder"
        if network.hub == "offline":
            hint = "unset HF_HUB_OFFLINE once to download it, or use a folder"
        return fail(found, f"{model.name} is not in the cache and cannot be downloaded", hint)
    if model.access == "absent":
        return fail(found, f"the Hub has no {model.name}", "check model.name_or_path and model.revision")
    return ok(found, f"{model.name} will be downloaded")


def _data_from_hub(plan: Plan, found: str, hub: str) -> Verdict:
    """For a run whose model is in a folder."""
    rows = [*plan.data.train, *(plan.data.eval or ())]
    names = [row["path"] for row in rows if isinstance(row, Mapping) and is_loaded_hub_id(row["path"])]
    if not names:
        return skip(found, "not used by the run")
    if hub == "reachable":
        return ok(found)
    hint = "`effilaunch prepare` downloads data in advance"
    return warn(found, f"must be in the cache: {', '.join(names)}", hint)


def gated(machine: Machine, plan: Plan | None) -> Verdict:
    """The login, and whether the hub gives it access to the model. Never the token."""
    found = "logged in to the hub" if machine.host.hub_login else "not logged in to the hub"
    model = machine.hub_model
    if plan is None or model is None:
        return ok(found)
    if model.access == "refused" and not model.cached:
        hint = "accept the terms on its page"
        hint += "" if machine.host.hub_login else " and log in: `hf auth login`"
        return fail(found, f"the Hub denies access to {model.name}: gated, private or missing", hint)
    return ok(found, "" if model.access == "unknown" else f"{model.name} is accessible")


def wandb(machine: Machine, plan: Plan | None) -> Verdict:
    """Login and server, without which a run with report_to: wandb is logged offline. Never the key."""
    found = "logged in to wandb" if machine.host.wandb_login else "not logged in to wandb"
    if plan is None or not reports_to(plan, "wandb"):
        return skip(found, "not used")
    env = machine.host.environment
    mode = plan.launch.env.get("WANDB_MODE") or env.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return ok(f"{found}, WANDB_MODE={mode}")
    offline = "the run will be logged offline; `wandb sync` uploads it later"
    if not machine.host.wandb_login:
        return warn(found, offline, "`wandb login`")
    if machine.wandb_obstacle is not None:
        hint = "`wandb login --relogin`, or check WANDB_BASE_URL and the proxy"
        return warn(found, f"{machine.wandb_obstacle}: {offline}", hint)
    return ok(found)


SOFTWARE_CHECKS = (
    Check("versions", "package versions", versions),
    Check("hub", "model hub", hub),
    Check("gated", "hub login", gated),
    Check("wandb", "wandb login", wandb),
)
