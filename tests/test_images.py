"""Models that are called with images and text: planned from a config.json, traced, and run on CPU ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.device import H100
from memplan.errors import MissingRule, PlanRefused
from memplan.models import TracedModel
from memplan.ops.kernel_calls import kernel_events
from memplan.record import Alloc
from memplan.shapes import BF16, Buffer
from memplan.tape import OpContext
from validate.cases import shipped_trace

transformers: Any = pytest.importorskip("transformers")
torch: Any = pytest.importorskip("torch")

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "image_size": 32, "intermediate_size": 176,
    "num_attention_heads": 4, "num_hidden_layers": 3, "patch_size": 8,
    "vision_use_head": False,
}  # fmt: skip
TEXT = {
    "model_type": "gemma", "head_dim": 16, "hidden_size": 64, "intermediate_size": 176,
    "num_attention_heads": 4, "num_hidden_layers": 5, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
PALIGEMMA = {
    "architectures": ["PaliGemmaForConditionalGeneration"], "image_token_index": 511,
    "model_type": "paligemma", "projection_dim": 64, "text_config": TEXT, "vision_config": VISION,
}  # fmt: skip
PIECES = (32 // 8) ** 2


@pytest.fixture
def paligemma(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PALIGEMMA))
    return tmp_path


def test_each_sequence_begins_with_an_image(paligemma, tmp_path):
    e = memplan.estimate(paligemma, cluster="8xh100-sxm", zero=3, seq_len=80)
    assert isinstance(e.model, TracedModel)
    assert (e.model.image_tokens, e.model.n_layers) == (PIECES, 8)
    assert any(
        f"which takes {PIECES} of its tokens (pixel_values of 3 x 32 x 32)" in note for note in e.notes
    )
    e.model.save(tmp_path / "trace.json")
    again = memplan.estimate(tmp_path / "trace.json", cluster="8xh100-sxm", zero=3, seq_len=80)
    assert again.worst.peak_bytes == e.worst.peak_bytes
    with pytest.raises(
        MissingRule, match=f"begins with an image of {PIECES} tokens; use {PIECES + 1} tokens or"
    ):
        memplan.estimate(paligemma, cluster="8xh100-sxm", zero=3, seq_len=PIECES)


@pytest.mark.parametrize(
    "kind, architecture, said",
    [
        ("mllama", "Mllama", r"does not say the sizes of the images .* trace the module itself"),
        ("qwen3_vl", "Qwen3VL", r"reads blocks of images \(deepstack_visual_indexes\) by modules"),
    ],
)
def test_other_images_of_any_size_are_refused(tmp_path, kind, architecture, said):
    config = {"model_type": kind, "architectures": [f"{architecture}ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingRule, match=said):
        memplan.estimate(tmp_path, cluster="8xh100-sxm", zero=3)


def test_sequences_that_end_with_an_image_are_refused():
    module = transformers.AutoModelForImageTextToText.from_config(
        transformers.PaliGemmaConfig(vision_config=VISION, text_config=TEXT, image_token_index=511)
    )
    inputs = {"input_ids": torch.full((2, PIECES), 511), "pixel_values": torch.zeros(2, 3, 32, 32)}
    with pytest.raises(memplan.MemplanError, match="give sequences that end with text"):
        memplan.trace(module, inputs, device="cpu")


def test_units_whose_last_block_gets_no_gradient():
    """LLaVA reads the last block but one of images: FSDP2 fails (`setStorage`) where both are a unit."""
    model = shipped_trace("hf-llava")
    assert [kind.n for kind in model.layers] == [1, 1, 3, 1, 1, 1, 3]
    plan: dict[str, Any] = {"dp": 2, "zero": 3, "seq_len": 64}
    memplan.estimate(model, **plan)
    with pytest.raises(PlanRefused, match="a unit of several blocks whose last gets no gradient"):
        memplan.estimate(model, **plan, fsdp_blocks=2)


@pytest.mark.parametrize("n, scan", [(1 << 22, 76_031), (81_920, 2_559), (12 << 20, 225_791)])
def test_masks_take_what_pytorch_allocates(n, scan):
    """As the caching allocator was asked on an H100 that is not there."""
    made = kernel_events(
        "masked_scatter", (n, 1), BF16, [Buffer("y", (n,), BF16, 0, "temporaries")], OpContext(device=H100)
    )
    assert [event.buffer.n_bytes for event in made if isinstance(event, Alloc)] == [2 * n, 8 * n, n, scan]
