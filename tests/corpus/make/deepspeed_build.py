"""Failures of the extensions that DeepSpeed compiles."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main

EMPTY = {"TORCH_EXTENSIONS_DIR": "extensions"}


@caused("jit-no-compiler", "none", env=EMPTY)
def jit_no_compiler():
    import os

    import tiny
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    os.environ["PATH"] = os.environ["PATH"].split(":")[0]  # a container without build tools
    optimizer = DeepSpeedCPUAdam(tiny.model().parameters(), lr=1e-3)
    optimizer.step()


@caused("jit-no-ninja", env=EMPTY)
def jit_no_ninja():
    import os

    import tiny
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    os.environ["PATH"] = "/bin-of-no-environment"
    optimizer = DeepSpeedCPUAdam(tiny.model().parameters(), lr=1e-3)
    optimizer.step()


if __name__ == "__main__":
    main()
