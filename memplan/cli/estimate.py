"""`memplan estimate`."""

from typing import Any, Final, get_args

import click

from memplan.cli.flags import (
    PlanCommand,
    blocks_option,
    choice_option,
    cluster_options,
    model_options,
    plan_options,
)
from memplan.cli.launcher_files import file_options, with_file
from memplan.cli.output import print_json, print_verdict_first
from memplan.cli.own_module import model_of
from memplan.device import DeviceType
from memplan.estimate import estimate
from memplan.tables import estimate_text, ledger_rows, ledger_text

EXAMPLES: Final = (
    "memplan estimate llama-3-8b --cluster 8xh100-sxm --zero 3",
    "memplan estimate llama-3-70b --cluster 64xh100-sxm --tp 8 --pp 4 --zero 1 --sequence-parallel "
    "--recompute full --global-batch 512",
    "memplan estimate llama-3-8b --cluster 8xh100-sxm --zero 3 --ledger",
)


@click.command("estimate", cls=PlanCommand, examples=EXAMPLES)
@click.argument("model", required=False)
@file_options()
@model_options()
@cluster_options(required=False, text="As in 64xh100-sxm; left out: memory and traffic only.")
@plan_options(dp=None, global_batch=None, seq_len=None)
@choice_option("--device", get_args(DeviceType), None, "Whose rules; left out: the cluster's, or cuda.")
@blocks_option()
@click.option(
    "--details", is_flag=True, help="Also the verdict's reasons, every collective, the time's parts."
)
@click.option("--ledger", is_flag=True, help="Also every named tensor at the worst instant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    model: str | None, *, blocks: str | None, details: bool, ledger: bool, as_json: bool, **asked: Any
) -> None:
    """What a plan asks of each GPU.

    MODEL is a name (see `memplan models`), the path of a Hugging Face config.json or of a trace, or
    package.module:factory, the name of a function of yours. It returns (module, inputs), (module, args,
    kwargs), or a dict of the arguments of memplan.trace: module, example_inputs, targets, loss, blocks, ...
    A file of torchtitan names it too, and Megatron's arguments describe it.
    """
    planned, asked = with_file(model, asked)
    model = planned if isinstance(planned, str) else None
    result = estimate(planned if model is None else model_of(model, blocks), **asked)
    worst = result.worst
    offloads = result.engine.offloads(result.plan)
    tables = {"ledger": worst.alive} | ({"host_ledger": worst.host_alive} if offloads else {})
    rows = {name: ledger_rows(alive) for name, alive in tables.items() if ledger}
    if as_json:
        print_json(result.to_dict() | rows)
        return
    print_verdict_first(estimate_text(result, model, details=details), result.verdict)
    for name, found in rows.items():
        where = f"stage {worst.stage}" + (", on the host," if name == "host_ledger" else "")
        click.echo(f"\nLedger of {where} at its worst instant\n{ledger_text(found)}")
