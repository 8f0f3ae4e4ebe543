import json
from dataclasses import replace

import pytest

from lockstep.errors import UserError
from lockstep.plan.hardware import (
    HARDWARE,
    LINKS,
    Hardware,
    find_hardware,
    find_link,
)
from lockstep.ranks.peaks import peak_of


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_peaks_are_dense(hardware):
    # A tensor core does half as many tf32 products as bf16 ones; with sparsity, twice as many.
    if "tf32" in hardware.peak:
        assert hardware.peak["bf16"] / hardware.peak["tf32"] == pytest.approx(2, rel=0.03)
    assert hardware.peak["fp16"] == hardware.peak.get("bf16", hardware.peak["fp16"])
    assert hardware.flops("32-true") == hardware.peak.get("tf32", hardware.peak["fp32"])


def test_every_figure_has_its_source():
    known = [*HARDWARE.values(), *LINKS.values()]
    assert all(len(item.source) > 10 for item in known)
    assert {"a100-40", "a100-80", "h100", "h200", "b200", "l40s", "l4", "t4"} < set(HARDWARE)
    assert {"rtx4090", "rtx5090"} < set(HARDWARE)


def test_bandwidths_are_of_one_direction():
    assert LINKS["nvlink4"].bandwidth == 450e9  # the data sheet's 900 GB/s are for both directions
    assert LINKS["pcie3"].bandwidth == pytest.approx(16e9, rel=0.02)
    assert LINKS["ndr"].bandwidth == 400e9 / 8


def test_each_generation_of_a_link_doubles_the_one_before():
    for first, second in (("pcie3", "pcie4"), ("pcie4", "pcie5"), ("hdr", "ndr"), ("ndr", "xdr")):
        assert LINKS[second].bandwidth == 2 * LINKS[first].bandwidth


def test_a_device_without_a_number_format_names_those_it_has():
    with pytest.raises(UserError, match=r"bf16.+t4 is only known for fp32, fp16"):
        HARDWARE["t4"].flops("bf16-mixed")


def test_a_link_is_a_name_or_a_number_of_gigabytes():
    like = LINKS["pcie4"]
    assert find_link("ndr", like) is LINKS["ndr"]
    link = find_link("12.5", like)
    assert (link.bandwidth, link.latency) == (12.5e9, like.latency)
    for wrong in ("nvlink9", "-1", "nan", "inf"):
        with pytest.raises(UserError, match=wrong):
            find_link(wrong, like)


def test_a_profile_is_loaded_as_saved(tmp_path):
    saved = replace(HARDWARE["l4"], name="mine", utilisation=0.31, measured=True)
    saved.save(tmp_path / "mine.json")
    assert find_hardware(str(tmp_path / "mine.json")) == saved


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"host_link": 1})])
def test_an_invalid_profile_is_rejected_by_name(tmp_path, content):
    (tmp_path / "wrong.json").write_text(content)
    with pytest.raises(UserError, match=r"wrong.json is not a profile"):
        Hardware.load(tmp_path / "wrong.json")


def test_unknown_hardware_is_rejected_with_the_known():
    with pytest.raises(UserError, match=r"v100 is not one of a100-40, a100-80, h100"):
        find_hardware("v100")


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_utilisation_of_a_run_counts_with_the_same_peaks(precision):
    known = {name.removeprefix("rtx").upper(): hardware for name, hardware in HARDWARE.items()}
    for name, hardware in known.items():
        device = f"RTX {name}" if name.isdigit() else name.split("-")[0]
        assert peak_of(device, precision) * 1e12 == hardware.flops(precision), name
