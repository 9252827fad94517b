"""Tests `spccl plot` of results on GPUs, with synthetic rows: which rows it draws, the roofline, the figure."""

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

from spccl import cli, plot
from spccl.bench import gpu_report, report
from spccl.bench.cases import Case

RATES = gpu_report.Rates(read_gbs=4000.0, write_gbs=4000.0, copy_gbs=3900.0)
FACTS = {
    "gpu": "4 x a gpu",
    "commit": "abc",
    "command": "spccl bench --device cuda",
    "hbm_read_gbs": "4000",
    "hbm_write_gbs": "4000",
    "link_gbs": "357",
}


def row(collective="all_reduce", sparsity=0.99, size=512 << 20, wire_bytes=8e6, **changes):
    case = Case(collective, size, "float32", "sum", sparsity)
    times = {"spccl": np.full(5, 300e-6), "nccl": np.full(5, 2400e-6), "nccl_symm": np.full(5, 3000e-6)}
    wrong = dict.fromkeys(times, 0)
    measured = report.Measured(times, wrong, wire_bytes, {"tile": 9}, {"spccl": 1e-5, "nccl": 1e-5})
    made = gpu_report.make_gpu_row(
        case, measured, world_size=4, device="cuda", in_place=True, graph=False, rates=RATES
    )
    return dataclasses.replace(made, **changes)


def written(tmp_path, rows):
    path = tmp_path / "gpu.csv"
    path.write_text(report.to_csv(rows, FACTS))
    return path


def read(tmp_path, rows):
    return report.read_csv(written(tmp_path, rows))[0]


def test_roofline_is_the_better_peers_time_over_the_floor(tmp_path):
    points = plot.gpu_points(read(tmp_path, [row()]), 512 << 20, "float32")
    ratio, low, high, roofline = points["all_reduce"][0.99]
    # 512 MiB are read and written at 4000 GB/s; 8 MB on the wire take less than that.
    assert roofline == pytest.approx(2400e-6 / (2 * (512 << 20) / 4000e9))
    assert ratio == low == high == pytest.approx(8)


def test_roofline_of_dense_data_is_the_wires(tmp_path):
    dense = 2 * 3 * (128 << 20)
    points = plot.gpu_points(read(tmp_path, [row(sparsity=0.0, wire_bytes=dense)]), 512 << 20, "float32")
    assert points["all_reduce"][0.0][3] == pytest.approx(2400e-6 / (dense / (gpu_report.LINK_GBS * 1e9)))


def test_other_rows_are_left_out(tmp_path):
    others = [row(sparsity=0.9, max_ctas=32), row(sparsity=0.5, dtype="bfloat16"), row(sparsity=0.0, size=64 << 20)]
    rows = [row(), *others]
    assert list(plot.gpu_points(read(tmp_path, rows), 512 << 20, "float32")["all_reduce"]) == [0.99]
    with pytest.raises(ValueError, match=r"no row of 16 MiB float32 .*; there is 512 MiB bfloat16, 512 MiB float32"):
        plot.gpu_points(read(tmp_path, rows), 16 << 20, "float32")


def test_rows_without_a_peer_are_no_points(tmp_path):
    with pytest.raises(ValueError, match="with a peer's time"):
        plot.gpu_points(read(tmp_path, [row(ratio=None)]), 512 << 20, "float32")


def test_command_draws_the_figure(tmp_path):
    pytest.importorskip("matplotlib")
    zeros = (0.0, 0.5, 0.9, 0.99, 0.999)
    source = written(tmp_path, [row(c, z) for c in plot.PAPER for z in zeros])
    picture = tmp_path / "gpu.png"
    done = CliRunner().invoke(cli.main, ["plot", str(source), "-o", str(picture)])
    assert done.exit_code == 0, done.output
    assert "15 points" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20000
    done = CliRunner().invoke(cli.main, ["plot", str(source), str(source), "-o", str(picture)])
    assert done.exit_code == 1 and "wanted one: a file" in done.output


def test_caption_names_source_machine_command_and_paper(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "gpu.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot.gpu_speedup_with_roofline(written(tmp_path, [row()]), picture)
    text = picture.read_text()
    for part in ("gpu.csv", "4 x a gpu", "spccl bench --device cuda", "abc", "the paper", "roofline"):
        assert part in text, part
