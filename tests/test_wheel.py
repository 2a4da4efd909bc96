"""What is installed from a wheel, in an environment and a folder of its own, does what the README says."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from tests import readme

ROOT = Path(__file__).parent.parent
README = "\n".join([file.read_text(encoding="utf-8") for file in (readme.README, *readme.MORE)])
COMMANDS = [block for block in re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL) if "make " not in block]
"""The READMEs' commands for a terminal; those of `make` are for a checkout, which CI runs anyway."""

(SUITE,) = re.findall(r"```toml\n(.*?)\n```", README, re.DOTALL)
"""The READMEs' suite, which their commands call mine.toml."""

NOT_RUN = (
    "pip install",
    "torchrun",
    "--suite gpu-",
    "--suite matrix",
    "--suite fullsize",
    "--suite deepspeed",
    "--suite fairscale",
    "--suite colossalai",
    "calibrate",
    "part*",
    "model_config.yaml",
)
"""Commands that download, need GPUs, others' engines, a launcher, a reader's own file or a night."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source archive, built without a network by what is installed."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of an environment with the wheel in it, which finds its dependencies where ours are.

    A folder that a .pth file names is searched, but the .pth files in it are not read: so the checkout that
    this test runs in is not found there.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    (wheel,) = built.glob("*.whl")
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, timeout=300, check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def run(installed, command, folder):
    """A README's block, by bash, as a reader would type it."""
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_what_is_built_has_the_data_and_the_tests_and_nothing_of_the_machine(built):
    (wheel,) = built.glob("*.whl")
    (source,) = built.glob("*.tar.gz")
    names = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True
    ).stdout
    for name in ("memplan/hardware/gpus.toml", "memplan/py.typed", "validate/data/published/memory.csv"):
        assert name in names
    assert "tests/" not in names
    with tarfile.open(source) as archive:
        assert any(name.endswith("/tests/fuzz.py") for name in archive.getnames())


def test_the_installed_package_is_the_wheels(installed, tmp_path):
    done = run(
        installed,
        "python -c 'import memplan, validate; print(memplan.__file__, validate.__file__)'",
        tmp_path,
    )
    assert done.stdout.count(str(installed.parent)) == 2, done.stdout + done.stderr
    assert run(installed, "memplan --version", tmp_path).stdout.startswith("memplan, version ")


@pytest.mark.slow
@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.splitlines()[0][:60])
def test_the_readmes_commands_run_outside_the_repository(installed, block, tmp_path):
    """Each ends with 0, but for the one that shows a refusal."""
    (tmp_path / "mine.toml").write_text(SUITE)
    for command in re.sub(r"\\\n\s*", "", block).splitlines():
        if command.startswith("#") or any(word in command for word in NOT_RUN):
            continue
        done = run(installed, command, tmp_path)
        expected = 2 if f"{block}\n```\n\n```text\nError: " in README else 0
        assert done.returncode == expected, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "block",
    re.findall(r"```python\n(.*?)\n```", README, re.DOTALL),
    ids=["a preset", "a module", "tensor ranks"],
)
def test_the_readmes_python_runs_outside_the_repository(installed, block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    done = run(installed, "python block.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
