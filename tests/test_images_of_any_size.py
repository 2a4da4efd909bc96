"""Models of images of any size (Qwen2-VL, Qwen2.5-VL): an image in each sequence, traced per micro-batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.device import H100
from memplan.errors import MissingRule
from memplan.models import TracedModel
from memplan.ops.kernel_calls import kernel_events
from memplan.record import Alloc
from memplan.shapes import BF16, INT32, INT64, Buffer, DType
from memplan.tape import OpContext

transformers: Any = pytest.importorskip("transformers")
torch: Any = pytest.importorskip("torch")

VISION = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "image_size": [32, 48], "mlp_ratio": 2,
    "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 1, "vocab_size": 128,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0},
}  # fmt: skip
CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": 127, "model_type": "qwen2_vl",
    "text_config": TEXT, "vision_config": VISION,
}  # fmt: skip
GRID = 32 // 4, 48 // 4
TOKENS = GRID[0] * GRID[1] // 4


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def peak(model: Any, **plan: Any) -> int:
    return memplan.estimate(model, cluster="1xh100-sxm", precision="bf16", **plan).worst.peak_bytes


def test_each_sequence_begins_with_an_image_of_the_size_that_is_asked_for(qwen):
    e = memplan.estimate(qwen, cluster="8xh100-sxm", precision="bf16", seq_len=80)
    assert isinstance(e.model, TracedModel)
    assert (e.model.of_batch, e.model.image_tokens, e.model.n_layers) == (1, TOKENS, 4)
    (note,) = [note for note in e.notes if "begins with an image" in note]
    assert f"{TOKENS} of its tokens (pixel_values of {GRID[0] * GRID[1]} x 96)" in note
    assert "write image_size into the vision_config of its config.json" in note


def test_other_micro_batches_are_traced_again(qwen, tmp_path):
    """A trace of another micro-batch from a file, which says no config.json, is refused."""
    models = [memplan.estimate(qwen, precision="bf16", seq_len=96, micro_batch=n).model for n in (1, 2)]
    assert isinstance(models[1], TracedModel)
    assert [getattr(model, "of_batch", None) for model in models] == [1, 2]
    saved = tmp_path / "trace.json"
    replace(models[1], config="").save(saved)
    assert peak(saved, seq_len=160, micro_batch=2) == peak(qwen, seq_len=160, micro_batch=2)
    with pytest.raises(MissingRule, match="was traced with a micro-batch of 2, and what it does at other"):
        peak(saved, seq_len=96, micro_batch=1)


def test_a_config_and_the_module_itself_give_the_same(qwen):
    """As the processor makes the inputs: patches of all samples one after the other."""
    settings = transformers.Qwen2VLConfig(vision_config=VISION, text_config=TEXT, image_token_id=127)
    settings.text_config.use_cache = False
    with torch.device("meta"):
        module = transformers.Qwen2VLForConditionalGeneration(settings)
    ids = torch.cat([torch.full((2, TOKENS), 127), torch.randint(3, 127, (2, 96 - TOKENS))], 1)
    inputs = {
        "input_ids": ids,
        "labels": ids.clone(),
        "mm_token_type_ids": (ids == 127).long(),
        "pixel_values": torch.empty(2 * GRID[0] * GRID[1], 96, device="meta"),
        "image_grid_thw": torch.tensor([[1, *GRID]] * 2),
    }
    found = memplan.trace(module, inputs, precisions=["bf16"])
    assert found.limits == (2, 0)
    for seq_len in (80, 128):
        own = peak(found, seq_len=seq_len, micro_batch=2)
        assert own == peak(qwen, seq_len=seq_len, micro_batch=2)


@pytest.mark.parametrize(
    "name, sizes, dtype, results, taken",
    [
        ("unique", (26,), INT32, 1, [104, 8, 1023]),
        ("unique", (40_000,), INT32, 1, [160_000, 8, 1023]),
        ("repeated", (4, 4), INT64, 1, [32, 1279, 4, 1, 32]),
        ("cumulative_sum", (4, 1), INT32, 1, [16, 16, 1023]),
        ("cumulative_sum", (128_606, 0), INT32, 1, [514_424, 1535]),
        ("added_by_index", (256, 256), BF16, 0, [2048] * 4 + [1]),
        ("added_by_index", (2305, 2305), BF16, 0, [18_440] * 4 + [43_007]),
        ("added_by_index", (40_000, 40_000), BF16, 0, [320_000] * 4 + [653_823]),
    ],
)
def test_kernels_take_what_pytorch_allocates(
    name: str, sizes: tuple[int, ...], dtype: DType, results: int, taken: list[int]
) -> None:
    """As the caching allocator was asked on an H100 that is not there."""
    made = [Buffer("y", (1,), dtype, 0, "temporaries") for _ in range(results)]
    events = kernel_events(name, sizes, dtype, made, OpContext(device=H100))
    assert [event.buffer.n_bytes for event in events if isinstance(event, Alloc)] == taken


def test_more_different_elements_than_were_looked_at_are_refused():
    made = [Buffer("y", (1,), INT32, 0, "temporaries")]
    with pytest.raises(
        MissingRule, match="unique_consecutive of 200000 int32 on CUDA takes memory that only"
    ):
        kernel_events("unique", (200_000,), INT32, made, OpContext(device=H100))


def test_a_search_traces_each_micro_batch(qwen):
    found = memplan.search(qwen, cluster="2xh100-sxm", global_batch=4, seq_len=96, precision="bf16")
    best = found[(found.zero == 0) & (found.recompute == "none") & found.peak_bytes.notna()]
    assert {1, 2} == {*best.micro_batch}
    for _, row in best.iterrows():
        plan: dict[str, Any] = {"dp": 2, "precision": "bf16", "seq_len": 96, "global_batch": 4}
        own = memplan.estimate(qwen, **plan, micro_batch=row.micro_batch)
        assert row.peak_bytes == own.worst.peak_bytes
