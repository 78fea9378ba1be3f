"""A ds_config beside a recipe: values that fight what the recipe plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launcher.knowledge.lint.consistency import ZERO, overlap, stage, value
from launcher.knowledge.lint.document import Document, Edit, Finding
from launcher.plan.draft import EXPLICIT
from launcher.plan.plan import Plan

# Dotted key -> the plan's setting; the Trainer refuses a value that differs from its own.
SAME_AS_TRAINER = {
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer.params.lr": "trainer.learning_rate",
    "optimizer.params.weight_decay": "trainer.weight_decay",
    "optimizer.params.eps": "trainer.adam_epsilon",
    "scheduler.params.warmup_max_lr": "trainer.learning_rate",
    "scheduler.params.warmup_num_steps": "trainer.warmup_steps",
}
# Dotted key -> the recipe's setting; compared where the recipe says it itself.
SAME_AS_RECIPE = {
    f"{ZERO}.stage": "sharding.zero_stage",
    f"{ZERO}.offload_optimizer.device": "sharding.offload_optimizer",
    f"{ZERO}.offload_param.device": "sharding.offload_param",
    f"{ZERO}.offload_optimizer.nvme_path": "sharding.nvme_path",
    f"{ZERO}.offload_param.nvme_path": "sharding.nvme_path",
}
TRAINER_DEFAULTS = {"trainer.max_grad_norm": 1.0, "trainer.weight_decay": 0.0, "trainer.adam_epsilon": 1e-8}
DEEPSPEED_CLIPS_AT = 1.0
_OFFLOADED = "adamw_torch"
"""What DeepSpeed's CPU Adam is a replacement for."""


class AgainstRecipe:
    """A rule of `lint_text`: the plan is the recipe's, made without the file."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, document: Document) -> Iterator[Finding]:
        if document.root is None:
            return
        yield from self._batch(document)
        yield from self._precision(document)
        yield from self._settings(document)
        yield from self._clipping(document)
        yield from self._blocks(document)
        yield from self._zero(document)
        bytes_here = self.plan.hardware.device_bytes
        if bytes_here is not None and not self.plan.hardware.is_cpu:
            found = {f.path for f in overlap(document, None)}
            yield from (f for f in overlap(document, bytes_here) if f.path not in found)

    def setting(self, name: str) -> Any:
        """The plan's value, the Trainer's default where the plan says nothing."""
        return self.plan.at(name) if name in self.plan.names else TRAINER_DEFAULTS.get(name)

    def fights(
        self, document: Document, key: str, said: str, ours: Any, code: str = "ds-hf-mismatch"
    ) -> Finding:
        """One value that is not the recipe's. "auto" is the recipe's, where the Trainer fills it."""
        member = document.member(key)
        assert member is not None, "called for keys that are here"
        node = member.node
        new = '"auto"' if code != "ds-recipe-conflict" else json.dumps(ours)
        hint = f"write {new}, or say {said} in the recipe"
        message = f"{document.text[node.start : node.end]} here, while the recipe plans {said} = {ours}"
        edits = (Edit(node.start, node.end, new),)
        return document.found(node.start, key, code, message, hint, edits=edits)

    def _batch(self, document: Document) -> Iterator[Finding]:
        batch = self.plan.batch
        for key, said, ours in (
            ("train_batch_size", "global_batch_size", batch.global_size),
            ("train_micro_batch_size_per_gpu", "trainer.per_device_train_batch_size", batch.micro),
            ("gradient_accumulation_steps", "trainer.gradient_accumulation_steps", batch.accumulation),
        ):
            given = value(document, key)
            if given not in (None, "auto", ours):
                code = "ds-batch-mismatch" if key == "train_batch_size" else "ds-hf-mismatch"
                yield self.fights(document, key, said, ours, code)

        if document.member("gradient_accumulation_steps") is None and batch.accumulation > 1:
            assert document.root is not None, "asked before"
            yield document.found(
                document.root.start,
                "gradient_accumulation_steps",
                "ds-hf-mismatch",
                f"no gradient_accumulation_steps: accelerate writes 1, the recipe plans {batch.accumulation}",
                'write "gradient_accumulation_steps": "auto"',
            )

    def _precision(self, document: Document) -> Iterator[Finding]:
        planned = self.plan.precision
        for kind in ("bf16", "fp16"):
            given = value(document, f"{kind}.enabled")
            if isinstance(given, bool) and given != (planned == kind):
                yield self.fights(document, f"{kind}.enabled", "precision", planned)

    def _settings(self, document: Document) -> Iterator[Finding]:
        for key, name in SAME_AS_TRAINER.items():
            given, ours = value(document, key), self.setting(name)
            if given not in (None, "auto") and ours is not None and given != ours:
                yield self.fights(document, key, name, ours)
        for key, name in SAME_AS_RECIPE.items():
            given, known = value(document, key), self.plan.provenance.get(name)
            explicit = known is not None and known.source in EXPLICIT
            if explicit and given not in (None, "auto") and given != (held := self.plan.at(name)):
                yield self.fights(document, key, name, held, "ds-recipe-conflict")

    def _clipping(self, document: Document) -> Iterator[Finding]:
        ours = self.setting("trainer.max_grad_norm")
        if document.member("gradient_clipping") is None and ours not in (None, DEEPSPEED_CLIPS_AT):
            assert document.root is not None, "asked before"
            yield document.found(
                document.root.start,
                "gradient_clipping",
                "ds-clip-default",
                f"no gradient_clipping: DeepSpeed clips at {DEEPSPEED_CLIPS_AT}, and the recipe's "
                f"trainer.max_grad_norm = {ours} does not arrive",
                'write "gradient_clipping": "auto"',
            )

    def _blocks(self, document: Document) -> Iterator[Finding]:
        for name, code, ours, effect in (
            ("scheduler", "ds-scheduler-overrides", "trainer.lr_scheduler_type", "without a word"),
            ("optimizer", "ds-optimizer-block", "trainer.optim", "and may have to be compiled first (nvcc)"),
        ):
            member = document.member(name)
            if member is not None and value(document, f"{name}.type") is not None:
                said = f"a {name} block replaces the recipe's {ours} {effect}"
                hint = f"remove the block and say {ours}"
                yield document.found(member.start, name, code, said, hint, edits=document.removal(name))

    def _zero(self, document: Document) -> Iterator[Finding]:
        device = document.member(f"{ZERO}.offload_optimizer.device")
        optim = str(self.setting("trainer.optim") or "adamw_torch")
        own = value(document, "zero_force_ds_cpu_optimizer") is False or optim.startswith(_OFFLOADED)
        if device is not None and device.node.value in ("cpu", "nvme") and not own:
            said = f"offload replaces trainer.optim = {optim} by DeepSpeed's CPU Adam, without a word"
            where = f"{ZERO}.offload_optimizer.device"
            hint = "train with adamw_torch, or without offload"
            yield document.found(device.node.start, where, "ds-offload-optimizer-swap", said, hint)
        section, name = document.member(ZERO), "gather_16bit_weights_on_model_save"
        gathered = document.member(f"{ZERO}.stage3_{name}") or document.member(f"{ZERO}.{name}")
        if section is None or stage(document) != 3 or self.plan.job.adapter:
            return
        if gathered is None or gathered.node.value is False:
            at = section.start if gathered is None else gathered.node.start
            said = "stage 3 without gathering: a checkpoint holds no model.safetensors"
            hint = f'write "stage3_{name}": true'
            edits = () if gathered is None else (Edit(gathered.node.start, gathered.node.end, "true"),)
            where = f"{ZERO}.stage3_{name}"
            yield document.found(at, where, "ds-zero3-no-gather", said, hint, edits=edits)
