"""The hardware notation and the device catalogue."""

from __future__ import annotations

import pytest
from every import every

from launcher.errors import RecipeError
from launcher.machine.hardware import DEVICES, UNNAMED, figures_of, parse_hardware, with_host_memory


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "device"),
    [
        ("8xA100-80GB", 1, 8, "A100-80GB"),
        ("2x8xH100-80GB", 2, 8, "H100-80GB"),
        ("cpu", 1, 1, "cpu"),
        ("2xcpu", 1, 2, "cpu"),
        ("1x24GB", 1, 1, "24GB"),
        ("t4", 1, 1, "T4-16GB"),
        ("8xH20", 1, 8, "H20-96GB"),
        ("4xgb200", 1, 4, "GB200-186GB"),
        ("RTX4070", 1, 1, "RTX4070-12GB"),
        ("RTX4070TiSuper", 1, 1, "RTX4070TiSuper-16GB"),
        ("8xMI300X", 1, 8, "MI300X-192GB"),
    ],
)
def test_notation(text: str, nodes: int, devices: int, device: str) -> None:
    hardware = parse_hardware(text)
    assert (hardware.num_nodes, hardware.devices_per_node, hardware.device) == (
        nodes,
        devices,
        device,
    )
    assert parse_hardware(hardware.label) == hardware


@every("name", DEVICES)
def test_every_catalogue_device_reads_back_from_its_label(name: str) -> None:
    assert parse_hardware(f"4x{name}").label == f"4x{name}"


def test_a_device_without_sourced_figures_is_ranked_and_never_timed() -> None:
    known = {name for name in DEVICES if figures_of(parse_hardware(name))[1]}
    amd = {"MI300X-192GB", "MI325X-256GB"}
    assert set(DEVICES) - known == {*amd, "RTX4070TiSuper-16GB"}
    assert {name for name, device in DEVICES.items() if device.capability is None} == amd
    assert figures_of(parse_hardware("MI300X")) == (UNNAMED, False)


def test_the_name_tells_the_capacity_within_the_vendors_rounding() -> None:
    """A typed digit of `mib` would move it out."""
    for name, device in DEVICES.items():
        told = int(name.rpartition("-")[2].removesuffix("GB"))
        assert told * 10**9 * 0.98 <= device.bytes <= told * 2**30 * 1.001, name


def test_unnamed_device_has_no_compute_capability() -> None:
    hardware = parse_hardware("1x24GB")
    assert hardware.compute_capability is None
    assert hardware.device_bytes == 24 * 10**9


@pytest.mark.parametrize("text", ["", "0xT4-16GB", "axb", "1x2x3xT4-16GB", "8 A100"])
def test_bad_notation(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_hardware(text)


def test_ambiguous_family_lists_its_members() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_hardware("8xA100")
    hint = caught.value.problems[0].hint or ""
    assert "A100-40GB" in hint
    assert "A100-80GB" in hint


def test_cpu_processes_share_the_host() -> None:
    assert with_host_memory(parse_hardware("2xcpu"), 64).device_bytes == 32
    assert with_host_memory(parse_hardware("cpu"), None).device_bytes is None
