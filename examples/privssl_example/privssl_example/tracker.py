"""A tracker that writes a line of JSON for each round."""

import json

from privssl.reporting.outside_trackers import TrackedRun
from privssl.reporting.trackers import RoundRecord, Tracker


class JsonLines(Tracker):
    """``rounds.jsonl`` in the folder of the run."""

    def __init__(self, run: TrackedRun) -> None:
        new = run.resume_after is None
        self._file = (run.folder / "rounds.jsonl").open("w" if new else "a")

    def round(self, record: RoundRecord) -> None:
        """Called once after each round."""
        self._file.write(json.dumps({"round": record.round, **record.values}) + "\n")

    def close(self) -> None:
        """Called at the end."""
        self._file.close()
