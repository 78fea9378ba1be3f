"""The tables of docs/performance.md, from the records that the benchmarks wrote.

    python benchmarks/performance_page.py docs/performance.md     fills them in

The table behind the mark <!-- NAME --> is made of the records NAME_<machine>.json, which the benchmarks write
with --json. Where there is none, the page says so and has no table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
ABSENT = "*Not measured yet: there is no record.*"
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, records: Path = RECORDS) -> str:
    """The page with the tables of all records between its marks."""
    tables = {"throughput": throughput_table, "gpu_throughput": gpu_table}

    def fill(match: re.Match[str]) -> str:
        kind = match[2]
        found = [
            json.loads(path.read_text(encoding="utf-8")) for path in sorted(records.glob(f"{kind}_*.json"))
        ]
        told = tables.get(kind, kept_table)
        return match[1] + ("\n".join(map(told, found)) or f"{ABSENT}\n") + match[3]

    return _BLOCK.sub(fill, page)


def throughput_table(record: Mapping[str, Any]) -> str:
    """Markdown of one record of throughput.py."""
    rows = []
    for row in record["rows"]:
        shown = [_ratio(row.get(name)) for name in ("to_plain", "cpu_to_plain")]
        loss = "" if row["final_loss"] is None else f"{row['final_loss']:.4f}"
        rows.append((f"`{row['side']}`", f"{row['tokens_per_second']:,.1f}", *shown,
                     f"{row['peak_bytes'] / 1e9:.2f}", f"{row['first_step_s']:.1f}", loss))  # fmt: skip
    head = ("side", "tokens/s", "ratio to `plain` (95 %)", "of CPU time", "peak, GB", "first step after, s",
            "last loss")  # fmt: skip
    without = [f"`{side}`: no claim; {reason}" for side, reason in record["failed"].items()]
    said = "".join(f"\n- {line}" for line in without)
    return f"{_about(record, record['machine'])}, {record['model']}\n\n{_table(head, rows)}{said}\n"


def gpu_table(record: Mapping[str, Any]) -> str:
    """Markdown of one record of gpu_throughput.py."""
    rows = []
    for row in record["rows"]:
        if "step_s" not in row:
            rows.append((f"`{row['name']}`", *[""] * 5, row.get("skipped") or row.get("error", "")))
            continue
        speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
        model = row["model"].split("/")[-1] if speed else ""
        rows.append((f"`{row['name']}`", model, speed, f"{row['flops_per_second'] / 1e12:.0f}",
                     *(_percent(row[name]) for name in ("mfu", "mfu_square", "of_measured"))))  # fmt: skip
    head = ("row", "model", "tokens/s", "TFLOP/s", "MFU", "MFU, whole square", "of the measured rate")
    return f"{_about(record, record['device'])}\n\n{_table(head, rows)}\n"


def kept_table(record: Mapping[str, Any]) -> str:
    """Markdown of a table as records.keep wrote it."""
    return f"{_about(record, record['machine'])}\n\n{_table(record['head'], record['rows'])}\n"


def _about(record: Mapping[str, Any], machine: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{machine}, {record['date']}, {versions}"


def _ratio(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main() -> int:
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
