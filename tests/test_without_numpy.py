"""An estimate, and all that it prints and writes, is the same where there is no NumPy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "data" / "published" / "configs.jsonl"

SHOW = """
import json, sys

class NotThere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotThere())
import memplan
from memplan.launchers import exported, targets
from memplan.tables import estimate_text, ledger_rows, ledger_text

plan = json.loads(sys.argv[1])
found = memplan.estimate(**plan)
print(estimate_text(found, details=True))
print(ledger_text(ledger_rows(found.worst.alive)))
print(json.dumps(found.to_dict()))
for to in targets(found):
    print(exported(found, to).text)
print("numpy" in sys.modules, file=sys.stderr)
"""

PLANS = {
    "a pipeline of tensor ranks": {
        "model": "llama-3-70b",
        "cluster": "64xh100-sxm",
        "tp": 8,
        "pp": 4,
        "zero": 1,
        "sequence_parallel": True,
        "recompute": "full",
        "global_batch": 512,
    },
    "a mixture of experts": {"model": "mixtral-8x7b", "cluster": "64xh200", "zero": 3, "seq_len": 2048},
    "a split backward pass": {
        "model": "llama-3-8b",
        "cluster": "8xa100-80-sxm",
        "pp": 4,
        "schedule": "zero-bubble",
        "zero": 2,
        "virtual_stages": 2,
        "global_batch": 64,
        "seq_len": 2048,
    },
    "megatron": {"model": "llama-3-8b", "cluster": "16xb200", "engine": "megatron", "tp": 2, "zero": 1},
    "another GPU's rates": {"model": "gpt2", "cluster": "12xl4", "gpus_per_node": 6, "zero": 2},
    "no verdict": {"model": "llama-3-8b", "cluster": "16xmi300x", "dp_replicate": 2, "zero": 3, "cp": 1},
    "no cluster": {"model": "gpt2", "engine": "textbook"},
    "a config.json": {"model": "google/gemma-7b", "cluster": "8xh100-sxm", "zero": 3},
}


def shown(plan: dict[str, object], absent: str) -> tuple[str, str]:
    """What is shown of a plan by a Python without these packages, and whether NumPy was imported."""
    command = [sys.executable, "-c", SHOW, json.dumps(plan), absent]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert not found.returncode, found.stderr
    return found.stdout, found.stderr.strip()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_estimate_is_the_same_without_numpy(plan, tmp_path):
    rows = {row["model"]: row["config"] for row in map(json.loads, CONFIGS.read_text().splitlines())}
    if config := rows.get(plan["model"]):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        plan = plan | {"model": str(file)}
    text, imported = shown(plan, "numpy pandas click yaml")
    assert plan.get("cluster", "") in text
    assert imported == "False"
    assert shown(plan, "") == (text, "False")
