"""Loads an exported folder, an adapter on its base, as its users do, in a process that knows nothing of the
run: `python -m launcher.train.exports.read_back`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from launcher.machine.child import answer
from launcher.train.exports.probes import encoded, greedy


def read_back(request: Mapping[str, Any]) -> dict[str, Any]:
    """Ids, template and greedy answers of plain transformers, which ends answers as the folder says."""
    import transformers

    transformers.logging.set_verbosity_error()
    folder, base = request["folder"], request["base"]
    options = {"trust_remote_code": request["trust_remote_code"]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    kind = getattr(transformers, request["model_class"])
    if base is None:
        model = kind.from_pretrained(folder, dtype="auto", **options)
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(kind.from_pretrained(**base), folder)
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    prompts = [encoded(tokenizer, prompt) for prompt in request["prompts"]]
    return {
        "ids": tokenizer(request["texts"])["input_ids"],
        "prompts": prompts,
        "template": tokenizer.chat_template,
        "answers": [greedy(model, ids) for ids in prompts] if request["writes"] else [],
    }


if __name__ == "__main__":
    sys.exit(answer(read_back))
