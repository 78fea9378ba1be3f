"""The page of devices: the catalogue with its sources."""

from __future__ import annotations

from recipe_page import NOTE, table

from launcher.machine.hardware import DEVICES, Device, Figures

INTRO = """\
`--on` and `hardware.device` take these names, in any case; the part before the size is enough where one
device has it (`8xH100`, `1xRTX4090`). Any other device is given by its memory, e.g. `1x24GB`: decimal
gigabytes, so a plan for it assumes no more than its data sheet promises. Which GPUs a plan without `--on`
counts, and what a run checks before it uses them: [doctor](../doctor.md#what-a-run-checks-at-its-start).

- **MiB**: as `nvidia-smi` reports them, of AMD's devices `amd-smi`. A plan without `--on` counts what the
  driver of this machine reports.
- **16-bit, TF32, fp32**: published dense peaks in TFLOP/s, with sums in fp32; fp32 without tensor cores,
  and in place of TF32 on devices that have none.
- **memory, link, host**: GB/s; link and host in one direction, to another device of the node and to host
  memory.

No figure was measured by this project. Peaks only rank plans. A device without figures ("unknown") is ranked
with placeholders, and its plans show no time.

**AMD's devices are in the list for their capacity only.** Memory estimates for them are those of a CUDA
device of the same size without a known compute capability: `precision: auto` is fp16, and bf16 must be set in
the recipe. Nothing was run on them. Parts that exist for CUDA alone, such as NCCL and the kernels of
bitsandbytes (`model.quantization: nf4`, 8-bit optimizers), are not replaced or checked for ROCm. A plan that
does not fit never suggests them."""
HEAD = ("name", "MiB", "compute capability", "16-bit", "TF32", "fp32", "memory", "link", "host", "source")


def devices_page() -> str:
    """One row for each device, in the order of the catalogue."""
    rows = [_row(name, device) for name, device in DEVICES.items()]
    return "\n".join(["# Devices", "", NOTE, "", INTRO, "", table(HEAD, rows), ""])


def _row(name: str, device: Device) -> tuple[str, ...]:
    capability = "none (AMD)" if device.capability is None else "{}.{}".format(*device.capability)
    size = f"{device.bytes / 2**20:,.0f}"
    return (f"`{name}`", size, capability, *_figures(device.figures))


def _figures(figures: Figures | None) -> tuple[str, ...]:
    if figures is None:
        return ("unknown",) * 6 + ("",)
    products = (figures.half, figures.tf32, figures.single)
    transfers = (figures.memory, figures.link, figures.host)
    return (*(f"{x / 1e12:g}" for x in products), *(f"{x / 1e9:,g}" for x in transfers), figures.source)
