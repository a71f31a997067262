"""`metrics.csv`: every figure of a run, one row a log interval or evaluation."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = (
    "step",
    "epoch",
    "samples_seen",
    "split",
    "loss",
    "metric",
    "learning_rate",
    "grad_norm",
    "samples_per_second",
    "gpu_memory_gb",
    "gpu_utilization",
    "elapsed_seconds",
)


class MetricsFile:
    """Appends rows; only the main process writes.

    Args:
        path: of the CSV file.
        metric: name of the metric's column.
    """

    def __init__(self, path: Path, metric: str) -> None:
        self.path = path
        named = [metric if name == "metric" else name for name in COLUMNS]
        self.columns = list(dict.fromkeys(named))  # the metric may be the loss

    def restore(self, keep: Callable[[dict[str, str]], bool]) -> float:
        """Drop rows that a resumed run will write again.

        Args:
            keep: tells of a row (column name to text) whether it stays.
        Returns: the seconds of training that the rows account for.
        """
        rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if _whole(row) and keep(row)]
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text.getvalue(), encoding="utf-8")
        temporary.replace(self.path)
        return max((float(row["elapsed_seconds"] or 0) for row in rows), default=0.0)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; unknown figures stay empty."""
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerow(
            {name: _short(row.get(name)) for name in self.columns}
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())


def _whole(row: dict[str, Any]) -> bool:
    """A machine that dies in mid-write leaves half a line."""
    return None not in row and None not in row.values() and row["step"].isdigit()


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
