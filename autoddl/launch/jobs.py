"""The protocol between a launcher and its ranks: a job file in, a result file of every rank out.

    job.json            one object: the task, and `folder`, where all files are
    result-RANK.json    the result of the rank
    losses-RANK         the losses of the rank, a line each, while it trains: there as soon as it is ready to
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoddl.core.errors import AutoDDLError
from autoddl.core.files import write_atomically
from autoddl.launch.launch import leave, report_failure

__all__ = ["Job", "serve"]

Job = dict[str, Any]


def serve(work: Callable[[Job, Path], Any]) -> None:
    """Runs `work(job, file of this rank's losses)` for the job that the command line names, and ends this process.

    The result goes into the job's folder; an error becomes one line for the launcher."""
    job: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, folder = os.environ["RANK"], Path(job["folder"])
    try:
        result = work(job, folder / f"losses-{rank}")
        write_atomically(folder / f"result-{rank}.json", json.dumps(result))
    except BaseException as error:
        report_failure(error)
        if job.get("debug"):
            traceback.print_exc()
        leave(2 if isinstance(error, AutoDDLError) else 1)
    leave(0)
