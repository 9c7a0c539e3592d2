"""python -m tests.faults: kills, refusals and races of every command, as a table."""

from __future__ import annotations

import sys
from tests.faults.kills import every, kill_everywhere
from tests.faults.processes import preload
from tests.faults.inputs import make_inputs
from tests.faults.commands import COMMANDS
from tests.faults.reference import Place
from pathlib import Path
import time
work=Path("/dev/shm/ft")
preload(); place=Place(work, make_inputs(work/"inputs"))
stride=int(sys.argv[1])
for n in sys.argv[2:] or COMMANDS:
    t=time.time(); o=kill_everywhere(COMMANDS[n], place, every(stride))
    print(n, o.points, o.states, o.survived, o.identical, o.volatile, round(time.time()-t,1))
    for f in o.failures: print("   ", f.point, "|", f.operation, "|", f.what)
