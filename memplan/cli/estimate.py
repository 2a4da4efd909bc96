"""`memplan estimate`."""

from typing import Any, get_args

import click

from memplan.cli.flags import (
    PlanCommand,
    blocks_option,
    choice_option,
    cluster_options,
    implementation_option,
    plan_options,
)
from memplan.cli.output import print_json
from memplan.cli.own_module import module_traced
from memplan.device import DeviceType
from memplan.estimate import estimate
from memplan.tables import estimate_text, ledger_rows, ledger_text


@click.command("estimate", cls=PlanCommand)
@click.argument("model")
@implementation_option()
@cluster_options(required=False, text="As in 64xh100-sxm; left out: memory and traffic only.")
@plan_options(dp=None, global_batch=None, seq_len=None)
@choice_option("--device", get_args(DeviceType), None, "Whose rules; left out: the cluster's, or cuda.")
@blocks_option()
@click.option("--ledger", is_flag=True, help="Also every named tensor at the worst instant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(model: str, *, blocks: str | None, ledger: bool, as_json: bool, **asked: Any) -> None:
    """What a plan asks of each GPU.

    MODEL is a name (see `memplan models`), the path of a Hugging Face config.json or of a trace, or
    package.module:factory, the name of a function that returns your own module and its example inputs.
    """
    how = {"precisions": (asked["precision"],), "blocks": blocks}
    module = module_traced(model, asked["device"], asked["cluster"], **how)
    result = estimate(module, **asked)
    worst = result.worst
    tables = {"ledger": worst.alive} | ({"host_ledger": worst.host_alive} if result.plan.offload else {})
    rows = {name: ledger_rows(alive) for name, alive in tables.items() if ledger}
    if as_json:
        print_json(result.to_dict() | rows)
        return
    click.echo(estimate_text(result))
    for name, found in rows.items():
        where = f"stage {worst.stage}" + (", on the host," if name == "host_ledger" else "")
        click.echo(f"\nLedger of {where} at its worst instant\n{ledger_text(found)}")
