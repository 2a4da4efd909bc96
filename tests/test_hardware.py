"""GPUs and clusters: tables with sources, units converted once, names and counts refused clearly."""

import datetime
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

import memplan
from memplan.errors import InvalidValue, MissingRule, UnknownName
from memplan.files import toml_table
from memplan.hardware import Cluster, cluster, gpu, gpu_names, resolve_cluster
from memplan.hardware.cluster import NODES
from memplan.hardware.gpu import GPUS
from memplan.names import words
from memplan.ops import attention_kernel
from memplan.shapes import BF16
from memplan.units import GiB


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_sources_a_date_and_a_node(name):
    entry = toml_table(GPUS)[name]
    assert len(entry["source"]) > 15
    assert isinstance(entry["retrieved"], datetime.date)
    assert ("usable_gib" in entry) == ("usable_source" in entry)
    assert sum(name in node["gpus"] for node in toml_table(NODES).values()) == 1


@pytest.mark.parametrize("name", toml_table(NODES))
def test_every_node_has_a_source_a_date_and_known_gpus(name):
    entry = toml_table(NODES)[name]
    assert len(entry["source"]) > 15
    assert isinstance(entry["retrieved"], datetime.date)
    assert set(entry["gpus"]) <= set(gpu_names())


@pytest.mark.parametrize("name", [n for n in gpu_names() if n != "cpu"])
def test_the_numbers_of_a_gpu_are_in_order(name):
    g = gpu(name)
    assert g.memory_bytes is not None
    assert g.usable_bytes is not None
    assert 0.9 * g.memory_bytes < g.usable_bytes < g.memory_bytes
    assert 0.25e12 < g.memory_bytes_per_s < 10e12
    assert 15e9 < g.link.bytes_per_s < 1e12
    assert 60 < g.board_power_w < 1500
    rates = [r for r in (g.fp32_flops_per_s, g.tf32_flops_per_s, g.bf16_flops_per_s, g.fp8_flops_per_s) if r]
    assert rates == sorted(rates)
    assert 8e12 < rates[0] <= rates[-1] < 1e16


def test_datasheet_units_are_converted_once():
    h100 = gpu("h100-sxm")
    assert h100.memory_bytes == 80 * GiB
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.link.bytes_per_s == 450e9
    assert cluster("16xh100-sxm").inter_node.bytes_per_s == 50e9


def test_cpu_ranks_have_no_limit_and_claim_no_rate():
    c = cluster("4xcpu")
    assert (c.gpu.kind, c.budget_bytes, c.n_nodes, c.inter_node.bytes_per_s) == ("cpu", None, 1, None)
    assert c.gpu.fp32_flops_per_s is None


@pytest.mark.parametrize("text", ["64xh100-sxm", " 64 X H100-SXM ", "64xH100-SXM"])
def test_a_cluster_is_its_text(text):
    c = cluster(text)
    assert (c.name, c.n_nodes, c.gpus_per_node) == ("64xh100-sxm", 8, 8)
    assert resolve_cluster(text) == c
    assert resolve_cluster(c) is c
    assert pickle.loads(pickle.dumps(c)) == c


@pytest.mark.parametrize(
    "text,name",
    [
        ("8xh100", "8xh100-sxm"),
        ("64xA100", "64xa100-80-sxm"),
        ("h100-sxm", "1xh100-sxm"),
        ("8xH100-80GB", "8xh100-sxm"),
        ("8 x NVIDIA A100-SXM4-40GB", "8xa100-40-sxm"),
        ("8xRTX4090", "8xrtx-4090"),
        ("4090", "1xrtx-4090"),
    ],
)
def test_a_cluster_by_another_name_is_read_and_said_aloud(text, name):
    read = cluster(text)
    assert (read, read.name) == (cluster(name), name)
    assert read.remarks == (f"{''.join(text.split())} is read as {name}.",)
    assert read.remarks[0] in memplan.estimate("gpt2", cluster=text, seq_len=64).notes
    assert cluster(name).remarks == ()


def test_no_two_gpus_share_a_name():
    said = [words(name) for key, entry in toml_table(GPUS).items() for name in {key, *entry.get("also", ())}]
    assert sorted(said) == sorted(set(said))


def test_part_of_a_node_is_one_node():
    assert (cluster("3xh100-sxm").gpus_per_node, cluster("3xh100-sxm").n_nodes) == (3, 1)


def test_no_cluster_stays_none():
    assert resolve_cluster(None) is None


@pytest.mark.parametrize(
    "text,error,message",
    [
        ("64xh100-smx", UnknownName, r"unknown GPU 'h100-smx'; did you mean 'h100-sxm'\?"),
        ("8xmi300y", UnknownName, r"unknown GPU 'mi300y'; did you mean 'mi300x'\? `memplan gpus` lists the"),
        ("rubin", UnknownName, r"unknown GPU 'rubin'\. `memplan gpus` lists the \d+ that are known\.$"),
        ("0xh100-sxm", InvalidValue, "n_gpus=0 is not allowed; use an integer from 1 to 1048576"),
        ("-8xh100-sxm", InvalidValue, "n_gpus=-8 is not allowed"),
        ("9" * 150 + "xh100-sxm", InvalidValue, "n_gpus=999"),
        ("9" * 9000 + "xh100-sxm", InvalidValue, "is not understood; use <n>x<gpu>"),
        ("12xh100-sxm", InvalidValue, "n_gpus=12 does not fill nodes of gpus_per_node=8; use 8 or 16"),
        ("1.5xh100-sxm", InvalidValue, "is not understood"),
        ("64x", InvalidValue, "is not understood"),
        ("", InvalidValue, "is not understood"),
        ("\u0664xh100-sxm", InvalidValue, "is not understood"),
        (64, InvalidValue, "cluster=64 is not a text"),
    ],
)
def test_a_bad_cluster_is_refused_with_a_way_out(text, error, message):
    with pytest.raises(error, match=message):
        cluster(text)


def test_a_cluster_of_ones_own():
    mine = replace(cluster("8xh100-sxm"), n_gpus=12, gpus_per_node=4, margin=0.0)
    assert (mine.n_nodes, mine.budget_bytes) == (3, mine.gpu.usable_bytes)
    with pytest.raises(InvalidValue, match=r"margin=1\.5 is not allowed"):
        replace(mine, margin=1.5)
    with pytest.raises(InvalidValue, match="n_gpus=2 does not fill nodes of gpus_per_node=4; use 4"):
        replace(mine, n_gpus=2)
    with pytest.raises(FrozenInstanceError):
        mine.n_gpus = 4  # type: ignore[misc]


def test_one_fits_rule():
    c = cluster("8xa100-80-sxm")
    assert isinstance(c, Cluster)
    assert c.budget_bytes == int(c.gpu.usable_bytes * 0.95)


NEW = [
    *("h20", "b300", "gb300", "mi325x", "mi355x", "rtx-3090", "rtx-5090", "rtx-pro-6000", "l4", "t4", "a10g"),
]


@pytest.mark.parametrize("name", NEW)
def test_a_gpu_of_2026_has_a_verdict_and_a_time(name):
    """A model of a billion weights, in fp16 where no rate in bf16 is known; AMD's have no verdict."""
    precision = "bf16-mixed" if gpu(name).bf16_flops_per_s else "fp16-mixed"
    result = memplan.estimate("llama-3.2-1b", cluster=f"8x{name}", zero=3, seq_len=512, precision=precision)
    assert result.verdict == ("cannot say" if name.startswith("mi") else "fits")
    assert result.step_s is not None


@pytest.mark.parametrize(
    "name,kernel", [("b300", "cudnn"), ("h20", "cudnn"), ("rtx-5090", "flash"), ("l4", "flash")]
)
def test_cudnns_attention_is_taken_on_hopper_and_blackwell_of_the_datacenter(name, kernel):
    asked = {"grouped": True, "dropout": False}
    assert attention_kernel(gpu(name).device, (2, 13), BF16, 128, **asked) == kernel


def test_a_kernel_that_nobody_has_measured_on_a_gpu_is_refused():
    with pytest.raises(
        MissingRule, match=r"rtx-5090 \(compute capability 12\.0\) has no rule here.*; use precision"
    ):
        memplan.estimate("phi-3-mini", cluster="8xrtx-5090", zero=3, seq_len=4096)
