"""Run a peer's script or module as it is, with the benchmark's clock among the Trainer's default callbacks.

python timed.py SCRIPT.py ARGUMENT …
python timed.py package.module ARGUMENT …
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    wanted, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    from clock import callbacks
    from transformers import trainer

    trainer.DEFAULT_CALLBACKS += callbacks()
    sys.argv = [wanted, *arguments]
    if wanted.endswith(".py"):
        runpy.run_path(wanted, run_name="__main__")
    else:
        runpy.run_module(wanted, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
