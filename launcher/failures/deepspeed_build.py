"""Known failures of DeepSpeed's extensions, which are compiled when a run first needs them."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

DEEPSPEED_BUILD = (
    Failure(
        id="jit-no-nvcc",
        title="no CUDA toolkit to compile an extension with",
        cause="A CUDA extension (FusedAdam and others) is compiled at the start of the run, and nvcc is not "
        "there or CUDA_HOME does not point at it.",
        mend="remove the optimizer block of the DeepSpeed config, which asks for it, or install the CUDA "
        "toolkit of torch's version and set CUDA_HOME",
        source="deepspeed/ops/op_builder/builder.py; torch/utils/cpp_extension.py",
        places=(Place("doctor", "nvcc"), Place("lint", "ds-optimizer-block"), Place("diagnose")),
        patterns=(
            # DeepSpeed prints the first two as warnings too, for extensions that nobody asks for.
            r"(?m)^(?!.*compatibility check failed).*CUDA_HOME does not exist, unable to compile CUDA op",
            r"(?m)^(?!.*compatibility check failed).*Unable to run \S*nvcc\S*, unable to compile CUDA op",
            r"CUDA_HOME environment variable is not set\. Please set it to your CUDA install root",
            r"No such file or directory: '?\S*/bin/nvcc",
            r"\bnvcc: (?:command )?not found",
        ),
    ),
    Failure(
        id="jit-no-ninja",
        title="ninja is not on the PATH",
        cause="torch builds extensions with ninja; the one of a virtual environment is found only where its "
        "bin folder is on the PATH.",
        mend="pip install ninja, and start the run from the activated environment",
        source="deepspeed/ops/op_builder/builder.py jit_load; torch/utils/cpp_extension.py",
        places=(Place("doctor", "ninja"), Place("diagnose")),
        patterns=(r"op due to ninja not being installed", r"Ninja is required to load C\+\+ extensions"),
    ),
    Failure(
        id="jit-no-compiler",
        title="an extension did not compile",
        cause="CPU offload compiles cpu_adam when it is first used, which needs a C++ compiler with C++17; "
        "CUDA extensions need nvcc too.",
        mend="install g++ (the lines above the error name what is missing), or drop the offload",
        source="deepspeed/ops/op_builder/builder.py; deepspeedai/DeepSpeed#889",
        places=(Place("doctor", "compiler"), Place("diagnose")),
        patterns=(
            r"Error building extension '(?:cpu_\w+|deepspeed_\w+|fused_\w+|utils|async_io|pin_memory"
            r"|(?:stochastic_)?transformer\w*|\w*quantizer|random_ltd|inference_\w+|ragged_\w+|evoformer\w*)'",
            # The build failed on another rank, or before.
            r"torch_extensions/\S+\.so: cannot open shared object file",
            r"error: #error -- unsupported GNU version",
            r"/ld: cannot find -l(?:curand|cuda|cudart|cublas)\b",
            r"CalledProcessError: Command '\['which', '(?:c|g)\+\+'\]' returned non-zero",
            # torch asks the compiler for its version before it compiles.
            r"(?s)^\S*(?:CalledProcessError|FileNotFoundError): .{0,4000}?torch/utils/cpp_extension\.py, "
            r"line \d+, in (?:check_compiler_ok_for_platform|get_compiler_abi_compatibility_and_version)\b",
        ),
        changes={"sharding.offload_optimizer": "none"},
    ),
    Failure(
        id="jit-cuda-mismatch",
        title="a CUDA toolkit of another version than torch's",
        cause="The nvcc that is found is of another version than the one torch was compiled with, and the "
        "two are not known to work together.",
        mend="install the toolkit of torch's CUDA version; with the same major version DS_SKIP_CUDA_CHECK=1 "
        "under `launch.env` accepts it",
        source="deepspeed/ops/op_builder/builder.py assert_no_cuda_mismatch; deepspeedai/DeepSpeed#3223",
        places=(Place("doctor", "nvcc"), Place("diagnose")),
        patterns=(
            r"Installed CUDA version \S+ does not match the version torch was compiled with [\d.]+,",
            r"The detected CUDA version \(\S+\) mismatches the version that was used to compile",
        ),
    ),
    Failure(
        id="jit-stale-lock",
        title="a build lock that a killed run left",
        cause="torch waits for the lock file in its extension folder without a message, also when the build "
        "that made it is dead: the run hangs where the optimizer is made.",
        mend="nothing: a run removes such locks before it starts, and `effilaunch doctor` shows them",
        source="torch/utils/file_baton.py; huggingface/transformers#26015; deepspeedai/DeepSpeed#4285",
        places=(
            Place("worker", "launcher.execute.leftovers:remove_stale_locks"),
            Place("doctor", "build-locks"),
            Place("diagnose"),
        ),
        # Where somebody interrupted the wait.
        patterns=(r"(?s)\n  File \S*torch/utils/file_baton\.py, line \d+, in wait\b",),
    ),
    Failure(
        id="prebuilt-op-mismatch",
        title="DeepSpeed was built for another torch",
        cause="Its extensions were compiled at installation, and torch or CUDA were changed since.",
        mend="reinstall DeepSpeed: pip install --force-reinstall --no-cache-dir deepspeed",
        source="deepspeed/ops/op_builder/builder.py validate_torch_version",
        places=(Place("doctor", "deepspeed-ops"), Place("diagnose")),
        patterns=(r"DeepSpeed ops were compiled and installed with a different version",),
    ),
    Failure(
        id="aio-missing",
        title="NVMe offload without libaio",
        cause="DeepSpeed's async_io extension needs the headers of libaio.",
        mend="install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or offload to cpu",
        source="deepspeed/ops/op_builder/async_io.py",
        places=(
            Place("worker", "launcher.commands.swapping:check_nvme"),
            Place("doctor", "libaio"),
            Place("diagnose"),
        ),
        patterns=(r"Unable to JIT load the async_io op due to it not being compatible",),
        changes={"sharding.offload_optimizer": "cpu", "sharding.offload_param": "none"},
    ),
)
