"""Which configurations are run: plain lists, named suites."""

from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Final

from memplan import Gpt, Llama, MemplanError, Model, Plan
from memplan.errors import unknown_name
from memplan.plan import OPTIMIZERS, PRECISIONS, SCHEDULES, check_plan

LEARNING_RATES: Final = {"sgd": 0.5, "sgd-momentum": 0.1, "adam": 0.003, "adamw": 0.003}
"""Large enough that a few steps on the same tokens move the loss far, so that a wrong gradient shows."""

LEAST_STEPS: Final = 7
"""Two to warm up, one whose collectives are counted, four whose memory is observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan for one model, to be run and compared.

    `steps` are optimizer steps in all; those after the first seven are timed. The ranks are ended after
    `timeout_s` seconds. Equal seeds mean equal weights and tokens.
    """

    name: str
    model: Model
    plan: Plan
    steps: int = LEAST_STEPS + 1
    seed: int = 1234
    timeout_s: float = 120.0

    @property
    def learning_rate(self) -> float:
        """The optimizer's step size."""
        return LEARNING_RATES[self.plan.optimizer]

    def reference(self) -> "Case":
        """The same training in a single process and a single batch: same model, tokens, precision, steps."""
        alone = Plan(
            micro_batch=self.plan.global_batch,
            global_batch=self.plan.global_batch,
            seq_len=self.plan.seq_len,
            precision=self.plan.precision,
            optimizer=self.plan.optimizer,
        )
        return replace(self, name="reference", plan=alone)

    def to_dict(self) -> dict[str, Any]:
        """The case as plain values."""
        model = {"family": type(self.model).__name__.lower(), **asdict(self.model)}
        return {**asdict(self), "model": model, "learning_rate": self.learning_rate}


LLAMA: Final = Llama(
    name="llama-small",
    n_layers=4,
    d_model=128,
    n_heads=8,
    n_kv_heads=4,
    d_ff=344,
    vocab_size=2048,
    max_seq_len=256,
)
GPT: Final = Gpt(
    name="gpt-small", n_layers=4, d_model=128, n_heads=4, d_ff=512, vocab_size=2048, max_seq_len=256
)
LLAMA_TIED: Final = replace(LLAMA, name="llama-small-tied", tied_head=True)
LLAMA_ODD: Final = replace(LLAMA, name="llama-small-odd", n_layers=3, vocab_size=1999, d_ff=341)
GPT_TIED: Final = replace(GPT, name="gpt-small-tied", tied_head=True)
GPT_DROPOUT: Final = replace(GPT, name="gpt-small-dropout", dropout=0.1)


def _case(name: str, model: Model, **plan: Any) -> Case:
    defaults: dict[str, Any] = {
        "global_batch": 2 * plan.get("dp", 1) if plan.get("tp", 1) > 1 and "pp" not in plan else 4,
        "seq_len": 128 if plan.get("precision", "fp32") == "fp32" else 64,
        "precision": "fp32",
        "optimizer": "adamw",
    }
    settings = defaults | plan
    return Case(name=f"{model.name}, {name}", model=model, plan=Plan(**settings))


def quick() -> tuple[Case, ...]:
    """Every kind of plan on one to eight ranks, small enough for a laptop."""
    sp: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    return (
        _case("one rank", LLAMA),
        _case("one rank, bf16", LLAMA, precision="bf16", global_batch=2),
        _case(
            "one rank, bf16-mixed, recompute", LLAMA, precision="bf16-mixed", recompute="full", global_batch=2
        ),
        _case("one rank, micro-batch 2 of 8, sgd", GPT, micro_batch=2, global_batch=8, optimizer="sgd"),
        _case("one rank, recompute, adam", GPT_TIED, recompute="full", optimizer="adam"),
        _case("one rank, dropout", GPT_DROPOUT),
        _case("dp2", LLAMA, dp=2),
        _case("dp2, long sequence", LLAMA, dp=2, global_batch=2, seq_len=256),
        _case("dp4, recompute", LLAMA, dp=4, recompute="full", global_batch=8, micro_batch=2),
        _case("dp2, bf16", GPT, dp=2, precision="bf16", optimizer="sgd-momentum"),
        _case("dp2, bf16-mixed", GPT, dp=2, precision="bf16-mixed"),
        _case("dp2, tied, sgd", GPT_TIED, dp=2, optimizer="sgd"),
        _case("dp2, dropout, recompute", GPT_DROPOUT, dp=2, recompute="full"),
        _case("dp2 zero1", LLAMA, dp=2, zero=1),
        _case("dp4 zero1, adam", GPT, dp=4, zero=1, optimizer="adam"),
        _case("dp3 zero1, odd", LLAMA_ODD, dp=3, zero=1, global_batch=3),
        _case("dp2 zero1, bf16-mixed", LLAMA, dp=2, zero=1, precision="bf16-mixed", optimizer="sgd-momentum"),
        _case("dp2 zero2", LLAMA, dp=2, zero=2),
        _case("dp4 zero2, recompute", GPT, dp=4, zero=2, recompute="full", global_batch=8),
        _case("dp2 zero2, bf16-mixed", LLAMA, dp=2, zero=2, precision="bf16-mixed"),
        _case("dp2 zero3", LLAMA, dp=2, zero=3),
        _case("dp2 zero3, recompute, bf16", LLAMA, dp=2, zero=3, recompute="full", precision="bf16"),
        _case("dp4 zero3, bf16-mixed", GPT, dp=4, zero=3, precision="bf16-mixed"),
        _case(
            "dp3 zero3, odd, sgd-momentum", LLAMA_ODD, dp=3, zero=3, global_batch=3, optimizer="sgd-momentum"
        ),
        _case("dp2 zero3, tied", LLAMA_TIED, dp=2, zero=3, optimizer="adam"),
        _case("tp2", LLAMA, tp=2),
        _case("tp4, recompute", GPT, tp=4, recompute="full"),
        _case("tp2, bf16-mixed", LLAMA, tp=2, precision="bf16-mixed", global_batch=2),
        _case("tp2 sp", LLAMA, **sp),
        _case("tp2 sp", GPT, **sp),
        _case("tp2 sp, recompute, bf16", LLAMA, **sp, recompute="full", precision="bf16", global_batch=2),
        _case("pp2 gpipe", LLAMA, pp=2, schedule="gpipe"),
        _case("pp2 1f1b", LLAMA, pp=2),
        _case("pp4 1f1b", GPT, pp=4, global_batch=8),
        _case(
            "pp3 1f1b, odd, recompute", replace(LLAMA_ODD, n_layers=4), pp=3, recompute="full", global_batch=6
        ),
        _case("pp2 gpipe, bf16", GPT, pp=2, schedule="gpipe", precision="bf16"),
        _case("pp2 1f1b, bf16-mixed", LLAMA, pp=2, precision="bf16-mixed"),
        _case("dp2 tp2", LLAMA, dp=2, tp=2),
        _case("dp2 tp2 sp zero1", GPT, dp=2, **sp, zero=1),
        _case("dp2 tp2 sp zero2", LLAMA, dp=2, **sp, zero=2),
        _case("dp2 tp2 zero3, bf16-mixed", LLAMA, dp=2, tp=2, zero=3, precision="bf16-mixed", global_batch=2),
        _case("pp2 dp2 1f1b", LLAMA, pp=2, dp=2),
        _case("pp2 dp2 zero1 gpipe", GPT, pp=2, dp=2, zero=1, schedule="gpipe"),
        _case("pp2 dp2 zero2 1f1b", LLAMA, pp=2, dp=2, zero=2),
        _case("pp2 dp2 zero3 gpipe, recompute", GPT, pp=2, dp=2, zero=3, schedule="gpipe", recompute="full"),
        _case("pp2 tp2 1f1b", LLAMA, pp=2, tp=2),
        _case("pp2 tp2 sp gpipe", GPT, pp=2, **sp, schedule="gpipe"),
        _case("pp2 dp2 tp2 sp zero3", LLAMA, pp=2, dp=2, **sp, zero=3),
        _case("pp2 dp2 tp2 zero1 gpipe", GPT, pp=2, dp=2, tp=2, zero=1, schedule="gpipe"),
    )


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


def _drawn_model(random: Random) -> Model:
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
    biases = {"attention_bias": random.random() < 0.2, "mlp_bias": random.random() < 0.2}
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
        "precision": random.choice(PRECISIONS),
        "optimizer": random.choice(OPTIMIZERS),
        "recompute": random.choice(("none", "none", "full")),
        "schedule": random.choice(SCHEDULES),
    }


def _title(plan: dict[str, Any]) -> str:
    axes = [f"{axis}{plan[axis]}" for axis in ("pp", "dp", "tp") if plan[axis] > 1] or ["one rank"]
    zero = [f"zero{plan['zero']}"] if plan["zero"] else []
    return " ".join([*axes, *zero, plan["precision"], plan["optimizer"]])


def suite(name: str) -> tuple[Case, ...]:
    """A suite by its name.

    Raises:
        UnknownName: with the nearest one.
    """
    suites = {"quick": quick, "drawn": drawn}
    if name not in suites:
        raise unknown_name("suite", name, suites)
    return suites[name]()
