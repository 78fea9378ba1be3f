"""Known failures of quantised bases: bitsandbytes, its configuration, and where the weights are put."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

QUANTIZATION = (
    Failure(
        id="purely-quantized",
        title="quantised model without an adapter",
        cause="int8 and 4-bit weights cannot be trained; the Trainer requires an adapter.",
        fix="add `adapter: {type: lora}`, or remove `model.quantization`",
        source="transformers/trainer_utils.py validate_quantization_for_training",
        versions="transformers>=4.31",
        places=("fix purely-quantized",),
        patterns=(
            r"You cannot perform fine-tuning on purely quantized models",
            r"Training an 8-bit model is not supported yet",
        ),
        changes={"model.quantization": "none"},
    ),
    Failure(
        id="load-in-kwargs-removed",
        title="load_in_8bit and load_in_4bit were removed",
        cause="transformers 5 removed these arguments of from_pretrained in favour of BitsAndBytesConfig.",
        fix="set `model.quantization`, or pass quantization_config=BitsAndBytesConfig(...)",
        source="huggingface/transformers#41287",
        versions="transformers>=5",
        places=("worker launcher.train.model.models:quantization_config",),
        patterns=(r"got an unexpected keyword argument 'load_in_[48]bit'",),
    ),
    Failure(
        id="bnb-config-typo",
        title="misspelt quantisation option",
        cause="BitsAndBytesConfig ignores unknown keys, so the model is loaded unquantised without a "
        "warning.",
        fix="set `model.quantization`; the run also checks the loaded model",
        source="transformers/utils/quantization_config.py",
        places=("refusal unknown-key", "worker launcher.train.model.models:_check_quantized"),
        patterns=(
            r"the model was loaded without (?:int8|nf4|fp4) quantisation",
            # Older versions name keys of their own here, of a configuration that they saved.
            r"Unused kwargs: \['(?!_load_in_|quant_method)\w+'.*BitsAndBytesConfig",
        ),
    ),
    Failure(
        id="bnb-both",
        title="load_in_8bit and load_in_4bit are both set",
        cause="A model is quantised to either 8 or 4 bits.",
        fix="choose one with `model.quantization`",
        source="transformers/utils/quantization_config.py",
        places=("worker launcher.train.model.models:quantization_config",),
        patterns=(r"load_in_4bit and load_in_8bit are both True",),
        changes={"model.quantization": "nf4"},
    ),
    Failure(
        id="bnb-defaults-slow",
        title="4-bit weights with fp32 compute",
        cause="BitsAndBytesConfig defaults to fp4 storage and fp32 compute, its slowest and least accurate "
        "combination.",
        fix="use nf4 with a 16-bit compute_dtype, as the plan does",
        source="bitsandbytes/nn/modules.py; transformers/utils/quantization_config.py",
        places=("worker launcher.planner.decide:decide_weights",),
        signs=(r"bnb_4bit_compute_d?type=torch\.float32 \(default\)",),
        changes={"model.quantization": "nf4"},
    ),
    Failure(
        id="bnb-bad-quant-type",
        title="unknown 4-bit type",
        cause="bnb_4bit_quant_type is read only during weight conversion, and the error is reported once per "
        "tensor.",
        fix="use nf4 or fp4",
        source="bitsandbytes/functional.py",
        places=("refusal wrong-choice",),
        patterns=(
            r"quant_type must be 'nf4' or 'fp4'",
            r"4-bit quantization data type \w+ is not implemented",
        ),
        changes={"model.quantization": "nf4"},
    ),
    Failure(
        id="device-map-auto-distributed",
        title="device_map='auto' with several processes",
        cause="device_map spreads the layers of one process over devices that the other processes use too.",
        fix="remove `model.device_map` (each rank then holds the model), or start one process",
        source="accelerate/accelerator.py prepare_model",
        places=("fix device-map-distributed",),
        patterns=(r"model that has been loaded with `device_map='auto'` in any distributed mode",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="tensors-on-two-gpus",
        title="tensors of one process on two GPUs",
        cause="The model is spread over several GPUs (device_map: auto) and labels, a mask or a module added "
        "later are on another one; or a script moves something to cuda:0 on every rank.",
        fix="start one process per GPU without device_map, as `effilaunch run` does, and use device "
        "LOCAL_RANK in each",
        source="modelscope/ms-swift#7107, #2044",
        places=("fix device-map-distributed",),
        patterns=(
            r"Expected all tensors to be on the same device, but found at least two devices, cuda:\d+ and "
            r"cuda:\d+",
        ),
    ),
    Failure(
        id="kbit-wrong-device",
        title="quantised model on the device of another rank",
        cause="Every rank loaded its quantised weights onto the first GPU, and quantised weights cannot be "
        "moved.",
        fix="load them onto the rank's own device: device_map={'': LOCAL_RANK}",
        source="accelerate/accelerator.py prepare_model; transformers/integrations/accelerate.py",
        places=("fix local-device-map",),
        patterns=(r"in 8-bit(?: or 4-bit)? precision on a different device than the one",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="kbit-multi-device",
        title="quantised model over several devices with several processes",
        cause="device_map split the weights over the devices, and more than one process was started.",
        fix="remove `model.device_map`, or start one process",
        source="accelerate/accelerator.py prepare_model",
        places=("fix device-map-distributed",),
        patterns=(r"in 8-bit(?: or 4-bit)? precision on multiple devices\b",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="kbit-cpu-offload",
        title="quantised weights do not fit on the GPUs",
        cause="The device map placed layers in CPU memory or on disk, where quantised layers cannot be "
        "trained.",
        fix="use nf4 instead of int8, or more or larger GPUs",
        source="transformers/quantizers/quantizer_bnb_8bit.py; accelerate/accelerator.py prepare_model",
        places=("worker launcher.train.model.models:_check_present",),
        patterns=(
            r"Some modules are dispatched on the CPU or the disk",
            r"in 8-bit(?: or 4-bit)? precision with CPU or disk offload",
            r"the device map put \S+ and \d+ more out of the devices' memory",
        ),
        changes={"model.quantization": "nf4", "model.device_map": None},
    ),
    Failure(
        id="zero3-device-map",
        title="device_map under ZeRO-3",
        cause="ZeRO-3 places the weights itself and refuses any device_map.",
        fix="remove `model.device_map`",
        source="transformers/integrations/accelerate.py check_and_set_device_map",
        places=("fix zero3-no-device-map", "fix zero-device-map-asked"),
        patterns=(r"DeepSpeed Zero-3 is not compatible with (?:`low_cpu_mem_usage|passing a)",),
        changes={"model.device_map": None},
    ),
    Failure(
        id="zero3-int8",
        title="int8 base under ZeRO-3",
        cause="ZeRO-3 partitions int8 weights. Known results are errors and losses ten times too high.",
        fix="set `sharding.zero_stage: 2` or `model.quantization: nf4`",
        source="axolotl-ai-cloud/axolotl#2068; huggingface/accelerate#3730",
        places=("fix zero3-int8",),
        patterns=(r"Only Tensors of floating point and complex dtype can require gradients",),
        changes={"sharding.zero_stage": 2},
    ),
    Failure(
        id="zero3-4bit-load",
        title="ZeRO-3 loads the whole 4-bit model on every rank",
        cause="Quantised models are not partitioned during loading: each GPU first holds the whole model and "
        "then its shard.",
        fix="check that the whole 4-bit model fits on one GPU, or use a lower ZeRO stage",
        source="transformers/modeling_utils.py get_init_context",
        places=("fix zero3-4bit-load",),
        changes={"sharding.zero_stage": 2},
    ),
    Failure(
        id="fsdp-4bit-storage",
        title="FSDP does not shard 4-bit weights",
        cause="4-bit weights are stored as uint8. FSDP2 skips them with a warning, so every rank holds them "
        "all; FSDP1 raises an error.",
        fix="set bnb_4bit_quant_storage to the compute dtype, or use DeepSpeed",
        source="accelerate/utils/fsdp_utils.py",
        places=("refusal fsdp-quantized",),
        patterns=(
            r"Cannot flatten integer dtype tensors",
            r"Must flatten tensors with uniform dtype but got .{0,80}torch\.u?int8",
        ),
        signs=(r"non-floating frozen Params4bit",),
        changes={"sharding.engine": "deepspeed"},
    ),
    Failure(
        id="bnb-no-backend",
        title="bitsandbytes has no kernels for this device",
        cause="The installed bitsandbytes supports none of the devices of this machine.",
        fix="install a bitsandbytes version that does, or remove `model.quantization`",
        source="transformers/integrations/bitsandbytes.py; bitsandbytes/__init__.py",
        places=("doctor bitsandbytes",),
        patterns=(r"are supported by the bitsandbytes version you have installed",),
        changes={"model.quantization": "none"},
    ),
    Failure(
        id="bnb-cuda-binary",
        title="bitsandbytes has no binary for this CUDA version",
        cause="The compiled library for torch's CUDA version is missing or cannot be loaded: another major "
        "version, a wrong BNB_CUDA_VERSION, or an outdated system library.",
        fix="install a bitsandbytes built for torch's CUDA version and unset BNB_CUDA_VERSION; `effilaunch "
        "doctor` shows both versions",
        source="bitsandbytes/cextension.py",
        places=("doctor bitsandbytes",),
        patterns=(
            r"Attempted to use bitsandbytes native library functionality but it's not available",
            r"(?:CUDA|ROCm) VERSION MISMATCH",
            r"CUDA Setup failed despite (?:GPU|CUDA) being available",
            r"Configured CUDA binary not found at ",
            r"Could not find the bitsandbytes CUDA binary",
            r"Could not load bitsandbytes native library",
            r"libbitsandbytes_\w{1,40}\.so: (?:cannot open shared object file|undefined symbol)",
            r"(?:'NoneType' object|module 'bitsandbytes\S*') has no attribute "
            r"'c(?:quantize|dequantize|gemm|igemm|adam|lion|get)\w*'",
            r"name 'str2optimizer\w+' is not defined",
        ),
    ),
    Failure(
        id="kbit-compile",
        title="torch.compile with a quantised base",
        cause="transformers refuses a quantised model that was compiled before the Trainer is built.",
        fix="use `trainer.torch_compile`, or do not compile",
        source="transformers/trainer_utils.py validate_quantization_for_training",
        places=("fix kbit-compile",),
        patterns=(r"You cannot fine-tune quantized model with `torch\.compile\(\)`",),
        changes={"trainer.torch_compile": None},
    ),
    Failure(
        id="kbit-half",
        title="a quantised model was cast",
        cause="Code called .half(), .float() or .to(dtype) on the model, which packed weights do not "
        "support.",
        fix="remove the call; `precision` sets the dtype of everything else",
        source="transformers/modeling_utils.py",
        patterns=(r"`\.(?:half|float|to)(?:\(\))?` is not supported for (?:quantized model|`[48]-bit`)",),
    ),
    Failure(
        id="kbit-dataparallel",
        title="quantised model on one GPU while others idle",
        cause="A plain `python` start with several visible GPUs uses nn.DataParallel, which the Trainer "
        "skips for quantised models.",
        fix="start one process per GPU: `launch.launcher: auto`",
        source="transformers/trainer.py _wrap_model",
        places=(
            "refusal launcher-conflict",
            "worker launcher.planner.decide:decide_launcher",
            "worker launcher.render.command:render_env",
        ),
        changes={"launch.launcher": "auto"},
    ),
)
