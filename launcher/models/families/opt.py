"""OPT: learned positions, perhaps norms after the sums, perhaps an embedding narrower than its layers."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.models.families.model_type import ModelType
from launcher.models.layers.layout import LayerTape, Layout
from launcher.models.layers.linears import Sizes, linears_below
from launcher.models.layers.pre_norm import LayerNorms, post_norm
from launcher.models.layers.tape import Value


@dataclass(frozen=True)
class _Opt(LayerNorms):
    post_norm: bool = False

    def run(self, tape: LayerTape, x: Value) -> Value:
        return post_norm(self, tape, x) if self.post_norm else super().run(tape, x)

    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        """Queries are scaled before attention."""
        return tape.step([queries], queries.elements, queries.width), keys

    def last(self, tape: LayerTape, x: Value) -> Value:
        return x if self.post_norm else super().last(tape, x)

    def narrowed(self, tape: LayerTape, x: Value) -> Value:
        for one in self.linears:
            if one.name == "project_out":
                x = tape.product(x, one)
        return x


def _layers(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    linears = linears_below(
        "model.decoder.layers.{}.", s.layers, bool(c["enable_bias"]),
        *((f"self_attn.{name}", h, h, "norm1") for name in ("q_proj", "k_proj", "v_proj")),
        ("self_attn.out_proj", h, h, "attn"),
        ("fc1", h, s.inner, "norm2"),
        ("fc2", s.inner, h, "act"),
    )  # fmt: skip
    width = int(c["word_embed_proj_dim"] or h)
    if width != h:
        rows = (("project_out", h, width, ""), ("project_in", width, h, ""))
        linears += linears_below("model.decoder.", 1, False, *rows)
    affine = 1 if c["layer_norm_elementwise_affine"] else 0
    final_norm = c["do_layer_norm_before"] and not c["_remove_final_layer_norm"]
    positions = s.positions + 2  # position ids have an offset of two
    return _Opt.of(
        s,
        linears,
        layer_extra=4 * h * affine,
        model_extra=2 * h * affine if final_norm else 0,
        embed_width=width,
        positions=positions,
        dropout=float(c["dropout"]),
        post_norm=not c["do_layer_norm_before"],
        embed_paths=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        embed_sizes=((positions, h),),
    )


TYPES = (ModelType("opt", _layers, lacks=("token-classifier",), peft_targets=("q_proj", "v_proj")),)
