"""A stand-in for nvidia-smi: it answers any query by columns from a table, as the real program does.

An unknown column, an error, a late answer and an answer that changes are those of the real program; rows are
recorded ones, cut to the columns that are asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = r"""#!/bin/sh
[ -n "$FAKE_LOG" ] && echo "$*" >> "$FAKE_LOG"
[ -n "$FAKE_SLEEP" ] && exec sleep "$FAKE_SLEEP"
[ -n "$FAKE_RC" ] && { echo "$FAKE_ERR"; exit "$FAKE_RC"; }
folder=$(dirname "$0")
answer() {
  awk -F', *' -v asked="$2" 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; n = split(asked, want, ",")
      for (i = 1; i <= n; i++) if (!(want[i] in at)) {
        print "Field \"" want[i] "\" is not a valid field to query."; exit 2 }
      next }
    { line = $(at[want[1]]); for (i = 2; i <= n; i++) line = line ", " $(at[want[i]]); print line }' "$1"
}
case "$1" in
  --query-gpu=*) answer "$folder/gpus.csv" "${1#*=}" || exit $?
    [ -f "$folder/later.csv" ] && mv "$folder/later.csv" "$folder/gpus.csv"; exit 0;;
  --query-compute-apps=*) answer "$folder/apps.csv" "${1#*=}";;
  topo) echo NV12;;
  *) echo "| NVIDIA-SMI 580.65  Driver Version: 580.65  CUDA Version: 13.0 |";;
esac
"""
COLUMNS = ("index, uuid, name, memory.total, memory.used, compute_cap, driver_version, memory.free, "
           "mig.mode.current, display_active")  # fmt: skip
APPS = "pid, gpu_uuid, used_memory, process_name"


def row(
    index: int, name: str, total: object, capability: str, *,
    used: object = 4, mig: str = "[N/A]", display: str = "Disabled",
) -> str:  # fmt: skip
    """A row of the table; sizes in MiB."""
    free = total - used if isinstance(total, int) and isinstance(used, int) else total
    return (f"{index}, {uuid(index)}, {name}, {total}, {used}, {capability}, 580.65.06, {free}, {mig}, "
            f"{display}")  # fmt: skip


def uuid(index: int) -> str:
    return f"GPU-0000000{index}-1111-2222-3333-444444444444"


H100 = [row(i, "NVIDIA H100 80GB HBM3", 81559, "9.0", mig="Disabled") for i in range(8)]
LOST = [*H100[:7], row(7, "NVIDIA H100 80GB HBM3", "[GPU is lost]", "9.0", used="[GPU is lost]")]
SPARK = [row(0, "NVIDIA GB10", "[N/A]", "12.1", used="[N/A]")]
SLICED = [row(0, "NVIDIA A100-SXM4-80GB", "[Insufficient Permissions]", "8.0", mig="Enabled"),
          row(1, "NVIDIA A100-SXM4-80GB", 81920, "8.0", mig="Disabled")]  # fmt: skip
T4 = [row(i, "Tesla T4", 15360, "7.5") for i in range(2)]
STATION = [
    *(row(i, "NVIDIA A100-SXM4-80GB", 81920, "8.0", mig="Disabled") for i in range(4)),
    row(4, "NVIDIA T400 4GB", 4096, "7.5", used=300),
]
WORKSTATION = [row(0, "NVIDIA GeForce GT 1030", 2048, "6.1", used=300, display="Enabled"),
               row(1, "NVIDIA GeForce RTX 3090", 24576, "8.6")]  # fmt: skip
MIXED = [row(0, "NVIDIA GeForce RTX 3090", 24576, "8.6"), row(1, "Tesla V100-PCIE-32GB", 32510, "7.0")]


class NvidiaSmi:
    """The program in a folder of PATH."""

    def __init__(self, folder: Path, env: pytest.MonkeyPatch) -> None:
        self.folder, self.env = folder / "nvidia-smi-bin", env
        self.folder.mkdir()
        program = self.folder / "nvidia-smi"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        self.apps()
        env.setenv("PATH", str(self.folder), prepend=":")
        env.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def shows(self, *rows: str, later: list[str] | None = None, columns: str = COLUMNS) -> NvidiaSmi:
        """Answer with these rows; with `later` from the second query on."""
        for name, table in (("gpus.csv", [*rows]), ("later.csv", later)):
            if table is not None:
                (self.folder / name).write_text("\n".join([columns, *table]) + "\n")
        return self

    def apps(self, *rows: str) -> None:
        """Processes that compute: pid, gpu_uuid, used_memory (MiB), process_name."""
        (self.folder / "apps.csv").write_text("\n".join([APPS, *rows]) + "\n")

    def fails(self, text: str, status: int = 9) -> NvidiaSmi:
        self.env.setenv("FAKE_RC", str(status))
        self.env.setenv("FAKE_ERR", text)
        return self
