"""From an estimate to a run, and back: what a program that trains is told, one file a program.

`exported` writes a plan as a script, a command or a configuration of a launcher; `read` reads one back as the
keywords of `memplan.estimate`. Another package adds a launcher by an entry point of the group
`memplan.launchers` (see `memplan.registry`), whose object is a `Launcher`.
"""

from memplan.launchers.base import LAUNCHERS, Export, Launcher, Read, exported, read, targets
from memplan.launchers.deepspeed import read_configuration

__all__ = ["LAUNCHERS", "Export", "Launcher", "Read", "exported", "read", "read_configuration", "targets"]
