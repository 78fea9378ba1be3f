"""Compare a DeepSpeed config with the plan of a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher.knowledge.lint.consistency import ZERO, overlap, stage, trainers_checkpointing
from launcher.knowledge.lint.document import Document, LintFinding
from launcher.knowledge.lint.values import for_trainer
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
# Dotted key -> the recipe's setting; compared only if set in the recipe.
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
"""The optimizer that DeepSpeed's CPU Adam replaces without a difference."""


class AgainstRecipe:
    """A rule of `lint_text`: the plan is the recipe's, made without the file."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, document: Document) -> Iterator[LintFinding]:
        if document.root is None:
            return
        yield from self._values(document)
        yield from self._missing(document)
        yield from self._blocks(document)
        yield from self._zero(document)
        if not for_trainer(document):  # else check_effects has found it
            yield from trainers_checkpointing(document)
        bytes_here = self.plan.hardware.device_bytes
        if bytes_here is not None and not self.plan.hardware.is_cpu:
            found = {f.path for f in overlap(document, None)}
            yield from (f for f in overlap(document, bytes_here) if f.path not in found)

    def setting(self, name: str) -> Any:
        """Return the plan's value, or the Trainer's default."""
        return self.plan.at(name) if name in self.plan.names else TRAINER_DEFAULTS.get(name)

    def _planned(self) -> Iterator[tuple[str, str, Any, str]]:
        """Key of the config, setting of the plan, its value, and the code of a difference."""
        batch, mismatch = self.plan.batch, "ds-hf-mismatch"
        yield "train_batch_size", "global_batch_size", batch.global_size, "ds-batch-mismatch"
        micro = "trainer.per_device_train_batch_size"
        yield "train_micro_batch_size_per_gpu", micro, batch.micro, mismatch
        steps = "gradient_accumulation_steps"
        yield steps, f"trainer.{steps}", batch.accumulation, mismatch
        for key, name in SAME_AS_TRAINER.items():
            yield key, name, self.setting(name), mismatch
        for key, name in SAME_AS_RECIPE.items():
            known = self.plan.provenance.get(name)
            if known is not None and known.source in EXPLICIT:
                yield key, name, self.plan.at(name), "ds-recipe-conflict"

    def _values(self, document: Document) -> Iterator[LintFinding]:
        """Values that differ from the plan's."""
        for key, name, ours, code in self._planned():
            if ours is not None and document.value(key) not in (None, "auto", ours):
                yield self._differs(document, key, name, ours, code)
        for kind in ("bf16", "fp16"):
            given, ours = document.value(f"{kind}.enabled"), self.plan.precision
            if isinstance(given, bool) and given != (ours == kind):
                yield self._differs(document, f"{kind}.enabled", "precision", ours, "ds-hf-mismatch")

    def _differs(self, document: Document, key: str, name: str, ours: Any, code: str) -> LintFinding:
        new = json.dumps(ours) if code == "ds-recipe-conflict" else '"auto"'
        message = f"{document.source(key)} here, but the recipe plans {name} = {ours}"
        hint = f"write {new}, or set {name} in the recipe"
        return document.report(key, code, message, hint, at_value=True, new=new)

    def _missing(self, document: Document) -> Iterator[LintFinding]:
        """Keys without which a setting of the plan is not used."""
        key, planned = "gradient_accumulation_steps", self.plan.batch.accumulation
        if document.member(key) is None and planned > 1:
            message = f"missing: accelerate sets 1, the recipe plans {planned}"
            yield document.report(key, "ds-hf-mismatch", message, f'write "{key}": "auto"')
        key, ours = "gradient_clipping", self.setting("trainer.max_grad_norm")
        if document.member(key) is None and ours not in (None, DEEPSPEED_CLIPS_AT):
            message = f"no gradient_clipping: DeepSpeed clips at {DEEPSPEED_CLIPS_AT}, and the recipe's "
            message += f"trainer.max_grad_norm = {ours} is not used"
            yield document.report(key, "ds-clip-default", message, f'write "{key}": "auto"')

    def _blocks(self, document: Document) -> Iterator[LintFinding]:
        for name, code, ours, effect in (
            ("scheduler", "ds-scheduler-overrides", "trainer.lr_scheduler_type", "silently"),
            ("optimizer", "ds-optimizer-block", "trainer.optim", "and may have to be compiled first (nvcc)"),
        ):
            if document.value(f"{name}.type") is not None:
                message = f"the {name} block replaces the recipe's {ours} {effect}"
                hint = f"remove the block and set {ours}, or train without the recipe's"
                yield document.report(name, code, message, hint)

    def _zero(self, document: Document) -> Iterator[LintFinding]:
        where = f"{ZERO}.offload_optimizer.device"
        optim = str(self.setting("trainer.optim") or "adamw_torch")
        own = document.value("zero_force_ds_cpu_optimizer") is False or optim.startswith(_OFFLOADED)
        if document.value(where) in ("cpu", "nvme") and not own:
            message = f"offload silently replaces trainer.optim = {optim} by DeepSpeedCPUAdam"
            hint = "train with adamw_torch, or without offload"
            yield document.report(where, "ds-offload-optimizer-swap", message, hint, at_value=True)
        name = "gather_16bit_weights_on_model_save"
        keys = (f"{ZERO}.stage3_{name}", f"{ZERO}.{name}")
        written = next((key for key in keys if document.member(key) is not None), None)
        if document.member(ZERO) is None or stage(document) != 3 or self.plan.job.adapter:
            return
        if written is None or document.value(written) is False:
            message = "stage 3 without gathering: checkpoints contain no model.safetensors"
            hint = f'write "stage3_{name}": true'
            finding = document.report(
                written or ZERO, "ds-zero3-no-gather", message, hint, at_value=bool(written), new="true"
            )
            yield replace(finding, path=keys[0], edits=finding.edits if written else ())
