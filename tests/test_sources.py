"""Each rule names the symbol of PyTorch that it plays: where one is gone, a rule may have moved with it."""

import importlib
import re
from pathlib import Path

import pytest

import memplan

SYMBOL = re.compile(r"`(torch(?:\.\w+)*):([\w.]+)`")
"""As in `torch.optim.adam:_fused_adam`: the module, and the qualified name in it."""

PACKAGE = Path(memplan.__file__).parent
CITED = sorted(
    {
        (module, name, str(path.relative_to(PACKAGE)))
        for path in PACKAGE.rglob("*.py")
        for module, name in SYMBOL.findall(path.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize("module, name, path", CITED, ids=lambda text: text)
def test_every_symbol_that_a_rule_cites_is_in_the_installed_torch(module, name, path):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)


def test_the_engine_cites_symbols():
    assert len([path for *_, path in CITED if path.startswith("engines/torch/")]) > 40


def test_no_rule_of_the_engine_cites_a_file_of_pytorchs_python_code():
    left = re.compile(r"\btorch/[\w/]+\.py\b")
    folder = PACKAGE / "engines" / "torch"
    assert not [path.name for path in folder.rglob("*.py") if left.search(path.read_text(encoding="utf-8"))]
