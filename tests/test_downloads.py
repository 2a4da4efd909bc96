"""The 100 much downloaded models planned for FSDP2: what `python -m tests.downloads` wrote.

The expected FSDP2 units come from the module that transformers makes on the `meta` device: the outermost
modules whose class is in `_no_split_modules`, or all blocks if that is empty.
"""

import re
from collections import Counter
from typing import Any

import pytest

from tests.downloads import downloads, plans, total

PLANNED = [model for model, row in plans().items() if not row["said"]]
SHARED = "albert/albert-xxlarge-v2"
"""The only model without a list of blocks: it calls one block twelve times."""

WITHOUT_ARCHITECTURES = {"microsoft/deberta-v3-base": "DebertaV2ForMaskedLM"}
"""The class of a type whose file names none, as memplan takes it: the first that it knows inputs of."""


def test_each_model_is_planned_or_refused_in_one_sentence():
    assert len(downloads()) == 100
    assert list(plans()) == list(downloads())
    for model, row in plans().items():
        assert bool(row["said"]) == (not row["blocks"]), model
        assert len(row["said"]) < 500, model
        assert row["said"].endswith(".") or not row["said"], model


def test_nothing_but_one_model_has_no_blocks():
    assert [model for model in PLANNED if not total(plans()[model]["blocks"])] == [SHARED]


def test_every_unit_is_gathered_twice_and_the_root_once():
    """The last unit of a module is gathered in both passes too, as each is a unit of Accelerate's making."""
    for model in PLANNED:
        row = plans()[model]
        called = total(re.sub(r", \d+ never called", "", row["blocks"])) + int(row["modules"])
        assert int(row["gathers"]) == 2 * called + 1, model


@pytest.mark.slow
@pytest.mark.parametrize("model", PLANNED)
def test_the_units_are_those_of_the_module_itself(model):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = downloads()[model]["config"]
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    (name,) = config.get("architectures", [WITHOUT_ARCHITECTURES.get(model)])
    with torch.device("meta"):
        module: Any = getattr(transformers, name)._from_config(settings)
    wrapped, outer = list[str](), "."
    for path, one in module.named_modules():
        if type(one).__name__ in (module._no_split_modules or ()) and not path.startswith(outer):
            outer = f"{path}."
            wrapped.append(path)
    row = plans()[model]
    found = total(row["blocks"]) + int(row["modules"])
    if wrapped:
        tied = Counter([id(p) for _, p in module.named_parameters(remove_duplicate=False)])
        own = [path for path in wrapped if not _is_tied(module.get_submodule(path), tied)]
        assert found == len(own)
    else:
        assert found == getattr(settings, "num_hidden_layers", 0) or model == SHARED


def _is_tied(one: Any, names: Counter[int]) -> bool:
    return any(names[id(p)] > 1 for p in one.parameters())
