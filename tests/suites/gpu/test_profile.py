"""What Nsight Compute prints becomes a table; the script that it runs finds rows and checks before it profiles."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tilefold.errors import TilefoldError

BENCH = Path(__file__).parents[3] / "bench"


def script(name):
    """A script of bench/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ncu():
    return script("ncu_table")


IDENTITY = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
            "Grid Size", "Device", "CC"]  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: Metric, unit, and its value for each of two kernels.
FIGURES = [
    ("dram__bytes.sum", "Mbyte", "100.66", "1.05"),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "43.52", "1.00"),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%", "43.21", "0.87"),
    ("gpu__time_duration.sum", "usecond", "1,076.35", "3.14"),
    ("launch__registers_per_thread", "register/thread", "168", "32"),
    ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "%", "38.70", "2.10"),
    ("sm__instruction_throughput.avg.pct_of_peak_sustained_active", "%", "71.05", "11.40"),
    ("sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active", "%", "62.30", "0"),
    ("sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active", "%", "0", "0"),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "18.55", "49.20"),
    (STALL.format("long_scoreboard"), "inst", "0.50", "6.00"),
    (STALL.format("wait"), "inst", "1.50", "1.00"),
    (STALL.format("math_pipe_throttle"), "inst", "2.00", "0"),
    (STALL.format("selected"), "inst", "1.00", "1.00"),
    ("smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio", "inst", "1.25", "0.9"),
    ("smsp__cycles_active.avg", "cycle", "120,311.27", "(!) n/a"),
]


def quoted(cells):
    return ",".join(f'"{c}"' for c in cells)


def raw_page(*drop, unit=None):
    figures = [f for f in FIGURES if f[0] not in drop]
    first = ["0", "4711", "python3.12", "127.0.0.1", "view_out", "1", "7", "(128, 1, 1)", "(1536, 1, 1)", "0", "9.0"]
    second = [*first]
    second[0], second[4] = "1", "void at::native::vectorized_elementwise_kernel<4, at::native::F>(int, T2)"
    units = [unit if unit and name == "gpu__time_duration.sum" else u for name, u, _, _ in figures]
    lines = [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "view_out" - 0: 0%....50%....100% - 38 passes',
        "H2, q 32 x 12 x 512 x 64, 512 keys: 1 calls of tilefold",
        quoted([*IDENTITY, *(f[0] for f in figures)]),
        quoted([*("" for _ in IDENTITY), *units]),
        quoted([*first, *(f[2] for f in figures)]),
        quoted([*second, *(f[3] for f in figures)]),
    ]
    return "\n".join(lines) + "\n"


def test_a_raw_page_becomes_a_table(ncu):
    lines = ncu.table(ncu.kernels(raw_page())).splitlines()
    assert lines[0] == (
        "| kernel | us | DRAM % | L2 % | tensor pipe % | SM busy % | occupancy % | registers | warps wait for |"
    )
    figures, waits = lines[2][: lines[2].index("math")], lines[2][lines[2].index("math") :]
    assert figures == "| view_out | 1,076 | 43.2 | 38.7 | 62.3 | 71.0 | 18.6 | 168 | "
    assert waits == "math pipe throttle 40%, wait 30%, long scoreboard 10% |"
    elementwise = "| at::native::vectorized_elementwise_kernel | 3.1 | 0.9 | 2.1 | 0 | 11.4 | 49.2 | 32 | "
    assert lines[3:] == [f"{elementwise}long scoreboard 75%, wait 12% |"]


def test_other_names_units_and_what_is_missing(ncu):
    page = raw_page("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "launch__registers_per_thread", unit="ns")
    first = ncu.table(ncu.kernels(page)).splitlines()[2]
    assert first.startswith("| view_out | 1.1 | 43.5 | 38.7 | 62.3 | 71.0 | 18.6 | - | ")
    with pytest.raises(KeyError, match="fortnight"):
        ncu.table(ncu.kernels(raw_page(unit="fortnight")))


def test_other_pages_are_refused(ncu, tmp_path, capsys):
    details = quoted([*IDENTITY, "Section Name", "Metric Name", "Metric Unit", "Metric Value"])
    for text in ("", "==ERROR== permission denied", details, f"{details}\n{details}"):
        with pytest.raises(ValueError, match="--page raw"):
            ncu.kernels(text)
    (tmp_path / "a.csv").write_text(raw_page())
    ncu.main([str(tmp_path / "a.csv"), str(tmp_path / "a.csv")])
    assert capsys.readouterr().out.count("view_out") == 2


def test_the_script_runs_a_row(capsys):
    profile = script("profile_gpu")
    profile.main(["v-small", "--device", "cpu", "--small", "--calls", "2"])
    out = capsys.readouterr().out
    assert out.startswith("ok ") and "V-small, 19 x 517: 2 calls of tilefold" in out
    profile.main(["V-small", "--device", "cpu", "--small", "--contender", "torch.var"])
    with pytest.raises(TilefoldError, match="no row is called Z9"):
        profile.main(["Z9"])
    with pytest.raises(TilefoldError, match="has no flash"):
        profile.main(["V-small", "--device", "cpu", "--small", "--contender", "flash"])
