"""Count what a LoRA adapter trains: peft's rules in closed form.

As read in peft 0.21 (tuners/tuners_utils.py: `check_target_module_exists`, `inject_adapter`;
tuners/lora/config.py; utils/other.py). Where this cannot count, the real peft is asked
(train/trace_spec.py), and its answer is in the spec's `adapters`.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.shipped import facts_file
from launcher.models.adapted import Adapted, Reach
from launcher.models.families import type_of
from launcher.models.model import ModelSpec

_COUNTED = (
    "r", "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "use_dora",
)  # fmt: skip
_NO_PARAMETERS = (
    "type", "path", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "cast_input_dtype_enabled", "autocast_adapter_dtype", "runtime_config", "task_type", "loftq_config",
)  # fmt: skip
_ADAPTABLE = ("Linear", "Conv1D", "Embedding", "Conv1d", "Conv2d")


def is_all_linear(targets: Any) -> bool:
    """Whether `target_modules` is `all-linear`, which peft compares case-insensitively."""
    return isinstance(targets, str) and targets.lower() == "all-linear"


def adapter_fields(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """The LoraConfig fields that decide what is trained, with the plan's defaults."""
    given = {"r": 16, "target_modules": "all-linear"} | dict(adapter)
    return {
        key: value
        for key, value in given.items()
        if key not in _NO_PARAMETERS and (key == "target_modules" or not _is_absent(key, value))
    }


def _is_absent(field: str, value: Any) -> bool:
    """Whether peft treats the field as unset; layer 0 and an empty list of layers are set."""
    if field in ("layers_to_transform", "layers_pattern"):
        return value is None
    if field == "init_lora_weights":  # only MiCA also freezes half of the adapter
        return str(value).lower() != "mica"
    return value in (None, [], {}, "none") or value is False


def adapter_key(adapter: Mapping[str, Any]) -> str:
    """Equal for adapters that train the same modules at the same ranks."""
    return json.dumps(adapter_fields(adapter), sort_keys=True, default=str)


def adapted_by(spec: ModelSpec, adapter: Mapping[str, Any]) -> Adapted:
    """What the LoraConfig fields `adapter` do to the model.

    RecipeError where peft refuses or a name matches nothing; `not-in-closed-form` where only peft can tell
    and was not asked.
    """
    asked = dict(spec.adapters).get(adapter_key(adapter))
    found = asked or count_adapter(spec, adapter)
    if found is not None:
        return found
    message = f"only peft can count what this adapter trains on model_type {spec.model_type}"
    hint = "run `plan RECIPE` where the training packages are installed"
    raise RecipeError(Problem("not-in-closed-form", message, path="adapter", hint=hint))


def count_adapter(spec: ModelSpec, adapter: Mapping[str, Any]) -> Adapted | None:
    """`adapted_by` in closed form; None where there is none."""
    fields = adapter_fields(adapter)
    targets: str | Sequence[str] | None = fields.get("target_modules")
    if targets is None:
        targets = type_of(spec.model_type).peft_targets
    every = is_all_linear(targets)
    beside = set(fields) - {"r", "target_modules"}
    if every and not beside:  # a classification head is trained in full along with every adapter
        head = spec.head.own_params if spec.head.saved else 0
        width, block = _without_block(spec)
        return Adapted(fields["r"] * width + head + block, None, fields["r"])
    # peft rewrites patterns and names of experts to fused parameters.
    experts = has_experts(spec) and (isinstance(targets, str) or beside or not fields["target_modules"])
    if spec.foreign or beside - set(_COUNTED) or experts:
        return None
    _check_patterns(fields, targets)
    modules = list(_modules(spec))
    if not (problems := _problems(spec, modules, fields, targets)):
        own_head = [spec.head.name] if spec.head.saved else []  # in modules_to_save, as in the worker
        dense = spec.head.dense
        inner = [] if dense is None or not own_head else [dense.path]
        fields["modules_to_save"] = [*fields.get("modules_to_save", ()), *own_head, *inner]
        found = _count(spec, modules, fields, None if every else targets)
        return replace(found, params=found.params + _norm_of_block(spec)) if found and inner else found
    if None in problems:
        return None
    raise RecipeError([problem for problem in problems if problem is not None])


@dataclass(frozen=True, slots=True)
class _Module:
    """All copies of a module; `kind`: how peft treats it, or its class name."""

    path: str
    count: int
    kind: str
    inputs: int = 0
    outputs: int = 0
    params: int = 0
    """Of one copy."""
    shared: bool = False
    """Tied to another module."""
    every: tuple[str, ...] = ()
    """The copies' names; empty: those of the first `count` layers."""

    def names(self) -> Sequence[str]:
        if self.every or "{}" not in self.path:
            return self.every or (self.path,)
        return [self.path.replace("{}", str(i), 1) for i in range(self.count)]


def lora_params(spec: ModelSpec, r: int, target_modules: str | Sequence[str] | None) -> int:
    """Parameters that LoRA of rank `r` on these targets trains, including a classifier."""
    return adapted_by(spec, {"r": r, "target_modules": target_modules}).params


def adapted_paths(spec: ModelSpec, target_modules: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Paths of the modules that LoRA adapts, `{}` for the layer index; None: `all-linear`."""
    return adapted_by(spec, {"target_modules": target_modules}).paths


def lora_width(spec: ModelSpec, paths: Sequence[str] | None) -> int:
    """Parameters of rank-1 adapters on the modules of these paths; None: all linears."""
    if paths is None:
        experts = sum(width * count for width, count in _experts(spec))
        reached = (x for x in spec.linears if not x.skipped)
        return experts + sum((x.in_features + x.out_features) * x.count for x in reached)
    return sum((m.inputs + m.outputs) * m.count for m in _modules(spec) if m.inputs and m.path in paths)


def _without_block(spec: ModelSpec) -> tuple[int, int]:
    """(rank-1 parameters of all linears, parameters of the block before the classifier), which is trained in
    full like the classifier where there is one."""
    width, dense = lora_width(spec, None), spec.head.dense
    if dense is None or not spec.head.saved:
        return width, 0
    bias = dense.out_features if dense.bias else 0
    block = dense.in_features * dense.out_features + bias + _norm_of_block(spec)
    return width - dense.in_features - dense.out_features, block


def _norm_of_block(spec: ModelSpec) -> int:
    return spec.layout.norm_params(spec.hidden_size)


def _experts(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """(rank-1 parameters, count) of a mixture of experts under `all-linear`, as in peft 0.21.

    The router, and each expert's two fused weights; gate_up_proj holds two matrices and gets rank 2r.
    """
    hidden = spec.hidden_size
    for kind in spec.layout.stacks:
        if (count := kind.num_experts) and kind.expert_adapters:
            inner = kind.experts // (3 * count * hidden)
            yield hidden + count, kind.layers
            yield 2 * count * (2 * inner + hidden) + count * (inner + hidden), kind.layers


NO_ADAPTER = (
    "{count} linear layer(s), such as {first}, get no adapter: peft takes their names for those of experts, "
    "they return several tensors, or kernels read their weights directly"
)
"""Of the layers that `all-linear` means and does not reach."""


def without_adapter(spec: ModelSpec) -> list[str]:
    """A warning where `all-linear` leaves linears without an adapter."""
    names = [name for linear in spec.linears if linear.skipped for name in linear.names()]
    return [NO_ADAPTER.format(count=len(names), first=names[0])] if names else []


def reach_of(spec: ModelSpec, adapted: Adapted) -> Reach | None:
    """What an adapter reaches; None where only peft could tell and was not asked."""
    if spec.foreign or adapted.reach is not None:
        return adapted.reach
    sparse = [kind for kind in spec.layout.stacks if kind.num_experts]
    routers = sum(kind.num_experts * spec.hidden_size * kind.layers for kind in sparse)
    if adapted.paths is None:
        reached = bool(sparse) and all(kind.expert_adapters for kind in sparse)
        params = sum(linear.weights * linear.count for linear in spec.linears if not linear.skipped)
        params += spec.head.own_params if spec.head.saved else 0
        router = reached
    else:
        names = (*adapted.paths, *adapted.whole)
        reached = any(".experts" in name for name in names)
        router = any(map(is_router, names))
        params = sum(m.params * m.count for m in _modules(spec) if m.path in names)
    params += (spec.expert_weights if reached else 0) + (routers if router else 0)
    return Reach(params, reached if sparse else None, router if sparse else None)


def is_router(name: str) -> bool:
    """Whether a module or parameter of a mixture of experts, by its dotted name, chooses the experts."""
    return re.search(r"\.(gate|router)(\.weight)?$", name) is not None


def has_experts(spec: ModelSpec) -> bool:
    """Whether some layers have experts, or peft takes names of linears for those of experts."""
    return any(kind.num_experts for kind in spec.layout.stacks) or any(x.skipped for x in spec.linears)


def _modules(spec: ModelSpec) -> Iterator[_Module]:
    """Every module of the model."""
    known = set()
    for x in spec.linears:
        known.add(x.path)
        params, names = x.params // x.count, tuple(x.names()) if x.indices else ()
        yield _Module(x.path, x.count, "Linear", x.in_features, x.out_features, params, every=names)
    layout, head = spec.layout, spec.head
    if head.name:
        known.add(head.name)
        size = head.out_features * (head.in_features + (1 if head.bias else 0))
        yield _Module(head.name, 1, "Linear", head.in_features, head.out_features, size, head.tied)
    embedded = ((spec.vocab_size, layout.embed_width), *layout.embed_sizes)
    for i, (path, (row, width)) in enumerate(zip(layout.embed_paths, embedded, strict=False)):
        known.add(path)
        yield _Module(path, 1, "Embedding", row, width, row * width, i == 0 and head.tied)
    for path, kind in module_names().get(spec.model_type, {}).items():
        if not head.name:  # the class without a head has the names below its own
            path = path.partition(".")[2]
        if path and path not in known:
            names = tuple(path.replace("{}", str(i), 1) for i in _layers(spec, path))
            yield _Module(path, len(names), kind, every=names)


def _layers(spec: ModelSpec, path: str) -> Sequence[int]:
    """The layers that have a module: those with linears beside it, else all of its stack."""
    for beginning in (path.rpartition(".")[0] + ".", path.partition("{}")[0]):
        near = [x.indices or range(x.count) for x in spec.linears if x.path.startswith(beginning)]
        if near and "{}" in path:
            return sorted(set[int]().union(*near))
    return (0,)


@functools.cache
def module_names() -> dict[str, dict[str, str]]:
    """Family -> path -> class, of convolutions and of modules without a matrix."""
    return dict(json.loads(facts_file("module_names.json").read_text("utf-8"))["names"])


def _problems(
    spec: ModelSpec, modules: Sequence[_Module], fields: Mapping[str, Any], targets: str | Sequence[str]
) -> list[Problem | None]:
    """Fields that match nothing or that peft refuses; None: only peft can tell."""
    found: list[Problem | None] = []
    names = [name for module in modules for name in module.names()]
    if has_experts(spec) and not isinstance(targets, str):
        linears = [name for m in modules if m.inputs for name in m.names()]
        renamed = {linear.name for linear in spec.linears if linear.skipped}
        if any(not matching([t], linears) or t.rpartition(".")[2] in renamed for t in targets):
            return [None]
    for field, wanted in (
        ("target_modules", targets),
        ("modules_to_save", fields.get("modules_to_save", ())),
    ):
        every = [wanted] if isinstance(wanted, str) and field == "target_modules" else list(wanted)
        none = [w for w in every if not matching(w if wanted == w else [w], names) and not is_all_linear(w)]
        found += [_absent(spec, field, w, alone=len(none) == len(every)) for w in none]
    if not targets:
        message = f"peft knows no target_modules for {spec.model_type}"
        hint = "name modules, or all-linear"
        found.append(Problem("no-target-modules", message, path="adapter.target_modules", hint=hint))
    found += [idle_choice(field, value) for field, value in idle_choices(names, fields)]
    chosen = [field for field in ("layers_to_transform", "layers_pattern") if field in fields]
    if isinstance(targets, str) and chosen:
        message = "excludes a pattern in `target_modules`: peft selects layers only for a list of names"
        found.append(Problem("bad-adapter", message, path=f"adapter.{chosen[0]}"))
    elif fields.get("layers_pattern") and fields.get("layers_to_transform") is None:
        message = "needs `layers_to_transform`, else peft refuses it"
        found.append(Problem("bad-adapter", message, path="adapter.layers_pattern"))
    return found


def _check_patterns(fields: Mapping[str, Any], targets: str | Sequence[str]) -> None:
    """RecipeError for an invalid regular expression."""
    single = {"target_modules": targets, "exclude_modules": fields.get("exclude_modules")}
    patterns = [(key, value) for key, value in single.items() if isinstance(value, str)]
    layers = fields.get("layers_pattern") or ()
    patterns += [("layers_pattern", p) for p in ([layers] if isinstance(layers, str) else layers)]
    lists = ("rank_pattern", "alpha_pattern", "modules_to_save")
    patterns += [(key, p) for key in lists for p in fields.get(key, ())]
    for key, pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"{pattern!r} is not a valid regular expression: {error}"
            hint = "a string is a pattern for whole module names, e.g. '.*q_proj'; write names as a list"
            raise RecipeError(Problem("bad-adapter", message, path=f"adapter.{key}", hint=hint)) from None


def _absent(spec: ModelSpec, field: str, wanted: str, *, alone: bool) -> Problem:
    hint = f"its linear layers are {', '.join(sorted({linear.name for linear in spec.linears}))}"
    hint += "; all-linear matches all of them" if field == "target_modules" else ""
    code = "no-target-modules" if field == "target_modules" and alone else "target-modules-missing"
    message = f"{field} {wanted!r} matches no module of {spec.model_type}"
    return Problem(code, message, path=f"adapter.{field}", hint=hint)


def _count(
    spec: ModelSpec,
    modules: Sequence[_Module],
    fields: Mapping[str, Any],
    targets: str | Sequence[str] | None,
) -> Adapted | None:
    """The adapter over the modules that it matches; `targets` None: all linears."""
    ranks: dict[str, list[int]] = {}
    width = params = 0
    used: dict[str, set[str]] = {"rank_pattern": set(), "alpha_pattern": set()}
    for module in modules:
        for name in module.names():
            if targets is None and (module.kind != "Linear" or module.path == spec.head.name):
                continue
            if not chosen(name, fields, targets):
                continue
            if module.kind not in _ADAPTABLE:
                raise RecipeError(_unsupported(name, module.kind))
            dora = module.outputs if fields.get("use_dora") else 0
            if module.kind in ("Conv1d", "Conv2d") or module.shared or (dora and module.kind == "Embedding"):
                return None
            key = next((key for key in fields.get("rank_pattern", ()) if named_by(key, name)), None)
            for field, ever in used.items():
                ever |= {one for one in fields.get(field, ()) if named_by(one, name)}
            rank = fields["rank_pattern"][key] if key else fields["r"]
            ranks.setdefault(module.path, []).append(rank)
            width += module.inputs + module.outputs
            params += rank * (module.inputs + module.outputs) + dora
    if not ranks:
        message = "matches only modules that are excluded, in modules_to_save or in other layers"
        raise RecipeError(Problem("no-target-modules", message, path="adapter.target_modules"))
    if idle := [(f, key) for f, ever in used.items() for key in fields.get(f, ()) if key not in ever]:
        raise RecipeError([idle_pattern(field, key) for field, key in idle])
    saved = _whole(modules, fields, ranks)
    if saved is None:
        return None
    copies: Counter[str] = Counter()
    for module in modules:
        copies[module.path] += module.count
    uneven = len({r for each in ranks.values() for r in each}) > 1 or any(
        "{}" in path and len(each) != copies[path] for path, each in ranks.items()
    )
    whole = sum(m.params * m.count for m in modules if m.path in saved)
    return Adapted(params + whole, tuple(ranks), max(1, params // width), uneven, tuple(saved))


def chosen(name: str, fields: Mapping[str, Any], targets: str | Sequence[str] | None) -> bool:
    """peft's `check_target_module_exists`."""
    if (excluded := fields.get("exclude_modules")) and matches(excluded, name):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in fields.get("modules_to_save", ())):
        return False
    if targets is None or isinstance(targets, str) or name in targets:
        return targets is None or matches(targets, name)
    return matches(targets, name) and in_layers(name, fields)


def _whole(
    modules: Sequence[_Module], fields: Mapping[str, Any], adapted: Mapping[str, Any]
) -> list[str] | None:
    """Paths of modules_to_save; None where they contain modules, are also adapted, or are tied."""
    saved = []
    for module in modules:
        named = [name for name in module.names() if name.endswith(tuple(fields.get("modules_to_save", ())))]
        if not named:
            continue
        if not module.params or module.shared or module.path in adapted or len(named) != module.count:
            return None
        saved.append(module.path)
    return saved


def _unsupported(name: str, kind: str) -> Problem:
    message = f"matches {name} ({kind}), which peft cannot adapt"
    hint = "match only linear layers and embeddings; use modules_to_save to train other modules in full"
    return Problem("bad-adapter", message, path="adapter.target_modules", hint=hint)


def matching(target: str | Sequence[str], names: Sequence[str]) -> bool:
    """Whether a pattern, or one of the listed names, matches one of the modules."""
    return any(matches(target, name) for name in names)


def matches(target: str | Sequence[str], path: str) -> bool:
    """Whether a pattern matches the whole path, or the path ends with one of the listed names."""
    if isinstance(target, str):
        return re.fullmatch(target, path) is not None
    return any(path == name or path.endswith("." + name) for name in target)


def named_by(key: str, name: str) -> bool:
    """peft's `get_pattern_key`."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def layer_of(name: str, patterns: Sequence[str]) -> int | None:
    """The layer index of a module, from the first pattern that matches."""
    prefix = r"(?:^|.*?\.)" if patterns else r".*?\."
    for pattern in patterns or (r"[^.]*",):
        if match := re.match(rf"{prefix}{pattern}\.(?P<index>\d+)\.", name):
            return int(match["index"])
    return None


def in_layers(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a module is in the selected layers; by default, all layers are."""
    layers, patterns = fields.get("layers_to_transform"), fields.get("layers_pattern") or ()
    if layers in (None, []):
        return True
    index = layer_of(name, [patterns] if isinstance(patterns, str) else patterns)
    return index is not None and index in ([layers] if isinstance(layers, int) else layers)


def idle_pattern(field: str, key: str) -> Problem:
    """A key of rank_pattern or alpha_pattern that matches no adapted module."""
    message = f"{key!r} matches no adapted module: peft would ignore it"
    return Problem("target-modules-missing", message, path=f"adapter.{field}")


def idle_choices(names: Sequence[str], fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(field, value) of each exclusion, layer and layer pattern that matches none of these names."""
    excluded, layers, given = (
        fields.get(field) for field in ("exclude_modules", "layers_to_transform", "layers_pattern")
    )
    every = [excluded] if isinstance(excluded, str) else excluded or ()
    idle: list[tuple[str, Any]] = [
        ("exclude_modules", one)
        for one in every
        if not matching(one if isinstance(excluded, str) else [one], [name for name in names if name])
    ]
    chosen = [layers] if isinstance(layers, int) else layers or ()
    if not chosen:
        return idle
    patterns = [given] if isinstance(given, str) else given or ()
    found = {one: {i for name in names if (i := layer_of(name, [one])) is not None} for one in patterns}
    there = set().union(*found.values()) if patterns else {layer_of(name, ()) for name in names}
    idle += [("layers_pattern", one) for one, indices in found.items() if not indices]
    return idle + [("layers_to_transform", layer) for layer in chosen if layer not in there]


def idle_choice(field: str, value: Any) -> Problem:
    """The problem of an exclusion, layer or layer pattern that matches nothing."""
    what = {"exclude_modules": "no module", "layers_to_transform": "no layer", "layers_pattern": "no layers"}
    message = f"{value!r} matches {what[field]} of the model: peft would ignore it"
    return Problem("target-modules-missing", message, path=f"adapter.{field}")


def describe_idle_adapters(found: Mapping[str, Any]) -> str:
    """Message about the adapters that a run did not train. found: `idle_adapters` of result.json."""
    names = [str(name) for name in found["first"]]
    more = ", …" if found["count"] > len(names) else ""
    experts = "; an expert that no token chose has none" if any("expert" in name for name in names) else ""
    return (
        f"{found['count']:,} of {found['of']:,} got no gradient in {found['steps']} steps, so they have not "
        f"changed: {', '.join(names)}{more}{experts}"
    )
