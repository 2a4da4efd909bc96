"""Plans drawn at random."""

from random import Random
from typing import Any

from memplan import Gpt, Llama, MemplanError, Plan
from memplan.engines.checks import check_plan
from memplan.models import Decoder
from memplan.optimizers import COMMON
from validate.cases import Case


def drawn(n: int = 80, seed: int = 2026) -> tuple[Case, ...]:
    """Models and plans drawn at random on one to four ranks: combinations that nobody would think of."""
    random = Random(seed)
    found: list[Case] = []
    while len(found) < n:
        model, plan = _drawn_model(random), _drawn_settings(random)
        try:
            case = Case(name=f"{len(found):03} {model.name}, {_title(plan)}", model=model, plan=Plan(**plan))
            check_plan(case.model, case.plan)
        except MemplanError:
            continue
        found.append(case)
    return tuple(found)


def _drawn_model(random: Random) -> Decoder:
    sizes: dict[str, Any] = {
        "n_layers": random.randint(1, 5),
        "d_model": random.choice((32, 64, 96)),
        "n_heads": 4,
        "d_ff": random.choice((96, 128, 172, 256)),
        "vocab_size": random.choice((256, 500, 1000, 1536)),
        "max_seq_len": 256,
        "tied_head": random.random() < 0.3,
    }
    if random.random() < 0.5:
        return Gpt(name="gpt", dropout=random.choice((0.0, 0.0, 0.0, 0.1)), **sizes)
    biases: dict[str, Any] = {"attention_bias": random.random() < 0.2, "mlp_bias": random.random() < 0.2}
    return Llama(name="llama", n_kv_heads=random.choice((1, 2, 4)), **biases, **sizes)


def _drawn_settings(random: Random) -> dict[str, Any]:
    degrees = [(d, t, p) for d in range(1, 5) for t in (1, 2, 4) for p in range(1, 5) if d * t * p <= 4]
    dp, tp, pp = random.choice([*degrees, (2, 2, 1), (2, 1, 2), (1, 2, 2)])
    micro_batch = random.randint(1, 3)
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "zero": random.randint(0, 3) if dp > 1 else 0,
        "sequence_parallel": tp > 1 and random.random() < 0.5,
        "micro_batch": micro_batch,
        "global_batch": dp * micro_batch * (random.randint(1, 4) if pp == 1 else random.randint(pp, pp + 3)),
        "seq_len": random.choice((32, 64, 128, 200)),
        "precision": random.choice(("fp32", "bf16", "bf16-mixed")),
        "optimizer": random.choice(COMMON),
        "recompute": random.choice(("none", "none", "full")),
        "schedule": random.choice(("gpipe", "1f1b")),
    }


def _title(plan: dict[str, Any]) -> str:
    axes = [f"{axis}{plan[axis]}" for axis in ("pp", "dp", "tp") if plan[axis] > 1] or ["one rank"]
    zero = [f"zero{plan['zero']}"] if plan["zero"] else []
    return " ".join([*axes, *zero, plan["precision"], plan["optimizer"]])
