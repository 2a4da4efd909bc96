"""Packages that are missing or broken are named, with what to install, in one sentence."""

import json
import subprocess
import sys
from importlib.util import find_spec
from textwrap import dedent

import pytest

from memplan.errors import MissingPackage, installed, reason

HIDDEN = """
import runpy, sys
hidden = sys.argv[1]

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
sys.argv = sys.argv[2:]
"""


def without(package, *command, code="runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"):
    """What Python says on stderr where a package is not installed."""
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + code, package, *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode, done.stdout
    return done.stderr.strip()


@pytest.mark.parametrize("package", ["torch", "rich", "click"])
def test_validate_says_what_to_install(package):
    said = without(package, "validate", "run", "gpt2")
    assert said == (
        f"Error: python -m validate needs {package}, which is not installed; "
        "use pip install 'memplan[validate]'."
    )


def test_a_chart_says_what_to_install():
    code = "import memplan\nmemplan.estimate('gpt2').plot()"
    said = without("matplotlib", code=code).splitlines()[-1]
    assert said.endswith(
        "a chart needs matplotlib, which is not installed; use pip install 'memplan[plots]'."
    )


def test_tracing_a_module_says_what_to_install(tmp_path):
    said = without("torch", "memplan", "trace", "mine:make", "--out", str(tmp_path / "mine.json"))
    assert "needs torch, which is not installed; use pip install 'memplan[trace]'." in said
    assert len(said.splitlines()) == 1


def test_an_architecture_without_a_family_says_what_to_install(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]}))
    for package in ("torch", "transformers"):
        assert "pip install 'memplan[huggingface]'" in without(package, "memplan", "estimate", str(file))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_broken_torchvision_is_named_and_not_the_config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]}))
    broken = tmp_path / "broken"
    for folder, name, text in (
        ("torchvision", "__init__.py", "raise RuntimeError('operator torchvision::nms does not exist')\n"),
        ("torchvision-0.1.dist-info", "METADATA", "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n"),
    ):
        (broken / folder).mkdir(parents=True)
        (broken / folder / name).write_text(text)
    code = f"sys.path.insert(0, {str(broken)!r})\nrunpy.run_module(sys.argv[0], run_name='__main__')"
    said = without("nothing", "memplan", "estimate", str(file), code=code)
    assert "needs torchvision, which is installed but cannot be imported" in said
    assert "operator torchvision::nms does not exist" in said
    assert len(said) < 400


def test_an_error_inside_a_block_of_imports_that_memplan_raises_is_its_own():
    with pytest.raises(MissingPackage, match="first"), installed("x", "y"):
        raise MissingPackage("first")


def test_the_reason_of_an_error_is_its_first_sentence_on_one_line():
    dump = """
        Could not run 'aten::x' with arguments from the 'CUDA' backend. This could be because ...

        CPU: registered at
    """
    assert reason(NotImplementedError(dedent(dump))) == (
        "Could not run 'aten::x' with arguments from the 'CUDA' backend"
    )
    assert reason(FileNotFoundError(2, "No such file or directory", "secret")) == "No such file or directory"
    assert len(reason(ValueError("x" * 10**6))) == 160
    assert reason(ValueError("a\x1b[2J")).isprintable()
