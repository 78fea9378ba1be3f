"""DeepSeek-V3, and GLM-4.5 with its experts: the first layers are dense, the others have a shared block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.layers.attention import attended
from launcher.models.layers.feed_forward import chosen_rows, router_params
from launcher.models.layers.layout import LayerTape, Layout, of_kinds
from launcher.models.layers.linears import (
    LAYER,
    Linear,
    Sizes,
    attention_linears,
    gated_mlp,
    linears_below,
    partly_rotated,
    shared_mlp,
    without_adapters,
)
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Storage, Value


class _Sparse(PreNorm):
    def route(self, tape: LayerTape, x: Value) -> Value:
        """A product in float32, and a sigmoid of each expert's score."""
        block = tape.block
        count, d = self.num_experts, block.dtypes
        params, chosen = router_params(block), chosen_rows(block)
        weights = count * block.hidden
        wide = tape.cast(x, 4)
        if not d.autocast:
            saves = [wide.storage] if params else []
            if wide.node is not None and d.weight < 4:
                saves.append(Storage(4 * weights, weight=True))
            scores = tape.step([wide], block.tokens * count, 4, saves=saves, params=params, fresh=4 * params)
        else:
            scores = tape.matrix(wide, count, weights, params=params)
        shares = tape.step([scores], scores.elements, scores.width, save_out=True)
        top = tape.step([shares], chosen, shares.width, saves=[Storage(8 * chosen)])
        total = tape.step([top], block.tokens, top.width)
        shares = tape.step([top, total], chosen, top.width, saves=[top.storage, total.storage])
        return tape.step([shares], chosen, shares.width)


@dataclass(frozen=True)
class _DeepSeek(_Sparse):
    widths: tuple[int, int, int] = (0, 0, 0)
    """Of a head's plain part, of its rotated part and of its values."""

    def attention(self, tape: LayerTape, x: Value) -> Value:
        """Keys and values are made of a latent, queries perhaps of another one."""
        block = tape.block
        plain, rotated, values = self.widths
        linears = {one.name: one for one in self.linears}
        n, heads = block.tokens, block.heads * block.tokens
        if "q_proj" in linears:
            q = tape.product(x, linears["q_proj"])
        else:
            low = linears["q_a_proj"]
            q = self.norm(tape, tape.product(x, low), low.out_features)
            q = tape.product(q, linears["q_b_proj"])
        passed, turned = tape.views(q, heads * plain, heads * rotated)
        up = linears["kv_b_proj"]
        both = tape.product(x, linears["kv_a_proj_with_mqa"])
        latent, position = tape.views(both, n * up.in_features, n * rotated)
        latent = self.norm(tape, latent, up.in_features)
        turned, position = _rotate_pairs(tape, turned), _rotate_pairs(tape, position)
        q = tape.step([passed, turned], q.elements, max(passed.width, turned.width), passes=True)
        keys, v = tape.views(tape.product(latent, up), heads * plain, heads * values)
        # Both parts are written into one tensor, whose gradient is copied for each.
        k = tape.step([keys], q.elements, keys.width, temporary=keys.width * q.elements)
        spread = k.width * heads * rotated
        k = tape.step([k, position], k.elements, k.width, view=k.storage, temporary=spread)
        return attended(tape, x, self.mix(tape, q, k, v))


def _rotate_pairs(tape: LayerTape, x: Value) -> Value:
    """`(a * cos - b * sin, b * cos + a * sin)`, where a and b are every second value."""
    n, width = x.elements // 2, max(x.width, tape.block.dtypes.residual)
    first, second = (tape.step([x], n, x.width, view=x.storage) for _ in range(2))
    pairs = (first, second), (second, first)
    low, high = (tape.add(*(tape.step([one], n, width) for one in pair)) for pair in pairs)
    return tape.step([low, high], x.elements, width, passes=True)


def _dense_first(
    kind: type[_Sparse], s: Sizes, mix: Callable[[Sizes], tuple[Linear, ...]], extra: int = 0, **more: Any
) -> Layout:
    c = s.config
    dense, width = int(c["first_k_dense_replace"]), int(c["moe_intermediate_size"])

    def make(s: Sizes, mlp: str) -> Layout:
        linears = mix(s)
        if mlp == "dense":
            return kind.of(s, linears + without_adapters(gated_mlp(s)), extra, **more)
        linears += without_adapters(shared_mlp(s, "mlp.shared_experts", int(c["n_shared_experts"]) * width))
        sizes = (int(c["num_experts"]), width, int(c["num_experts_per_tok"]))
        return kind.with_experts(s, linears, sizes, extra, **more)

    return of_kinds(s, ["dense" if i < dense else "sparse" for i in range(s.layers)], make)


def _deepseek_v3(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    low, latent = c.get("q_lora_rank"), int(c["kv_lora_rank"])
    plain, rotated, values = (int(c[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, bias = s.heads * (plain + rotated), bool(c["attention_bias"])

    def mix(s: Sizes) -> tuple[Linear, ...]:
        base, n = LAYER + "self_attn.", s.layers
        first = (("q_proj", h, queries, "norm1"),)
        if low is not None:
            first = (("q_a_proj", h, int(low), "norm1"),)
        down = ("kv_a_proj_with_mqa", h, latent + rotated, "norm1")
        up = (("q_b_proj", int(low), queries, "query"),) if low is not None else ()
        return (
            *linears_below(base, n, bias and low is not None, *first),
            *linears_below(base, n, False, *up),
            *linears_below(base, n, bias, down),
            *linears_below(base, n, False, ("kv_b_proj", latent, s.heads * (plain + values), "latent")),
            *linears_below(base, n, bias, ("o_proj", s.heads * values, h, "attn")),
        )

    more = {"widths": (plain, rotated, values), "rotary_joined": True}
    return _dense_first(_DeepSeek, s, mix, int(low or 0) + latent, **more)


def _glm4_moe(s: Sizes) -> Layout:
    bias, norm = bool(s.config["attention_bias"]), bool(s.config.get("use_qk_norm", False))
    more = {"qk_norm": norm, **partly_rotated(s, 0.5)}
    return _dense_first(_Sparse, s, lambda s: attention_linears(s, qkv_bias=bias), **more)


TYPES = (ModelType("deepseek_v3", _deepseek_v3), ModelType("glm4_moe", _glm4_moe, lacks=ONLY_LANGUAGE))
