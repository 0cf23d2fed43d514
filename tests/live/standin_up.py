"""`fleetctl up` over stand-ins: `standin_up.py STATE_DIR JSON`, with JSON of plan and policy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleet.errors import FleetError
from fleet.targets import Desired
from fleetctl.commands.up import run_plan
from fleetctl.options import Target, fail
from fleetctl.servers import free_ports
from fleetctl.state import StateFolder
from fleetctl.supervisor import FleetPlan, default_commands
from fleetctl.words import WORKERS, Kind, Policy


def main() -> None:
    state, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    here = Path(__file__).parent
    control = state / "control"
    control.mkdir(parents=True, exist_ok=True)
    commands = default_commands()
    commands[Kind.ROUTER] = (sys.executable, str(here / "standin_router.py"), "--folder", str(control))
    for kind in WORKERS:
        worker = (sys.executable, str(here / "standin_worker.py"), "--folder", str(control))
        commands[kind] = (*worker, "--role", str(kind))
    flags = {Kind(kind): tuple(each) for kind, each in given.get("flags", {}).items()}
    folder = StateFolder(state)
    try:
        with folder.locked():
            plan = FleetPlan(
                fleet="default",
                host="127.0.0.1",
                port=free_ports(1)[0],
                model="nowhere",
                model_name="stand-in",
                desired=Desired(*given["desired"]),
                commands=commands,
                flags=flags,
                policy=Policy(**given.get("policy", {})),
                look_s=0.2,
            )
            report_fd = int(sys.argv[4]) if "--report-fd" in sys.argv else None
            run_plan(plan, Target("default", folder, None, given.get("json", False)), report_fd)
    except FleetError as error:
        fail(error, as_json=False)


if __name__ == "__main__":
    main()
