"""A prelude for ranks: each writes which part of the words it holds.

`widths-RANK.json` in the run directory: words of the logits that the model returns in training and in
evaluation, and rows of the head and of the token embedding that the rank holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.train.storages import local_part
from launcher.train.trainers import PlannedTrainer

plain = PlannedTrainer.compute_loss


def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
    loss, outputs = plain(self, model, inputs, return_outputs=True, **more)
    file = Path(self.args.output_dir).parent / f"widths-{self.args.process_index}.json"
    seen = json.loads(file.read_text()) if file.exists() else {}
    seen["training" if model.training else "evaluation"] = outputs["logits"].shape[-1]
    for name, module in (("head", "get_output_embeddings"), ("table", "get_input_embeddings")):
        seen[name] = local_part(getattr(self.model, module)().weight).shape[0]
    file.write_text(json.dumps(seen))
    return (loss, outputs) if return_outputs else loss


PlannedTrainer.compute_loss = compute_loss  # type: ignore[method-assign]
