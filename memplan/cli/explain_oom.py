"""`memplan explain-oom`."""

import click

from memplan.cli.output import print_json
from memplan.oom import explain_oom


@click.command("explain-oom")
@click.argument("snapshot")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(snapshot: str, *, as_json: bool) -> None:
    """What was alive when memory ran out, and what to do, from a CUDA memory snapshot.

    SNAPSHOT is a file that torch.cuda.memory._dump_snapshot(FILE) wrote, with recording on
    (torch.cuda.memory._record_memory_history()) before the model was made. It is read without executing
    anything in it, and without torch.
    """
    report = explain_oom(snapshot)
    if as_json:
        print_json(report.to_dict())
    else:
        click.echo(str(report))
