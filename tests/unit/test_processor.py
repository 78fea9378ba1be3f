"""What a processor can compute at most, by /proc/cpuinfo."""

from __future__ import annotations

import pytest

from launcher.machine.hardware import Processor, figures_of, parse_hardware, probe_processor, read_processor


def cpuinfo(flags: str, mhz: str = "2700.000") -> str:
    """Two cores as Linux lists them on x86."""
    core = f"processor\t: 0\nmodel name\t: A CPU @ 2.70GHz\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\n"
    return core + core.replace("2700", "900")


@pytest.mark.parametrize(
    ("flags", "single", "half", "named"),
    [
        ("fpu sse2", 8, 2, "sse at 2.7 GHz"),
        ("fpu avx", 16, 4, "avx at 2.7 GHz"),
        ("fpu avx avx2 fma", 32, 8, "avx2 at 2.7 GHz"),
        ("avx avx2 avx512f", 64, 16, "avx512f at 2.7 GHz"),
        ("avx2 avx512f avx512_bf16", 64, 128, "avx512f, avx512_bf16 at 2.7 GHz"),
        ("avx2 avx512f avx512_bf16 amx_bf16", 64, 1024, "avx512f, amx_bf16 at 2.7 GHz"),
    ],
)
def test_peaks_are_units_times_clock_of_the_first_core(flags, single, half, named):
    found = read_processor(cpuinfo(flags))
    assert found == Processor(single * 2.7e9, half * 2.7e9, named)


@pytest.mark.parametrize(
    "text",
    ["", "nothing", "Features : asimd\n", cpuinfo("avx2", "fast"), cpuinfo("", "2000"), cpuinfo("avx2", "0")],
)
def test_a_processor_that_says_too_little_is_unknown(text):
    assert read_processor(text) is None


def test_processes_share_the_cores():
    one = Processor(100e9, 400e9, "made up")
    alone, known = figures_of(parse_hardware("cpu"), one, cores=8)
    shared, _ = figures_of(parse_hardware("4xcpu"), one, cores=8)
    assert known
    assert (alone.single, alone.half) == (800e9, 3200e9)
    assert (shared.single, shared.half) == (200e9, 800e9)
    assert shared.memory < alone.memory
    assert "made up" in shared.source


def test_many_cores_share_the_memory():
    one = Processor(100e9, 400e9, "made up")
    few, many = (figures_of(parse_hardware("cpu"), one, cores=cores)[0] for cores in (2, 1000))
    assert many.memory / few.memory < 100


def test_an_idle_core_counts_by_its_highest_clock(tmp_path, monkeypatch):
    text = cpuinfo("avx2", "800.000")
    assert read_processor(text, 4e9).single == 5 * read_processor(text).single
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr("launcher.machine.hardware.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("launcher.machine.hardware.HIGHEST_CLOCK", tmp_path / "cpuinfo_max_freq")
    assert probe_processor() == read_processor(text)
    (tmp_path / "cpuinfo_max_freq").write_text("4000000\n")
    assert probe_processor() == read_processor(text, 4e9)
