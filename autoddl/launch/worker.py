"""The program of a rank that trains or is checked: `python -m autoddl.launch.worker JOB.json`.

A job is {"task": "train" or "check", "plan": a file, "factory": {...}, "folder": where results go, ...}. Rank r writes
`result-r.json` there, or one line about its error for the launcher.
"""

from pathlib import Path
from typing import Any

from autoddl.launch.check import check
from autoddl.launch.jobs import Job, serve
from autoddl.launch.train import train


def _work(job: Job, losses: Path) -> Any:
    if job["task"] != "train":
        return check(job)

    def told(loss: float) -> None:
        with open(losses, "a", encoding="utf-8") as file:
            print(loss, file=file)

    return train(job, told, losses.touch)


def main() -> None:
    """Runs the job that the command line names, as one rank."""
    serve(_work)


if __name__ == "__main__":
    main()
