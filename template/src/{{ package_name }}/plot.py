"""Learning curves: `metrics.csv` of a run drawn as a picture, without any server.

Run as `make plot`, or `python -m <package>.plot [--run_name NAME] [--output FILE|-]`; training
calls `draw_curves` at its end. Reading is forgiving, since the file may grow while it is read.
"""

import argparse
import csv
import io
import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError, run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS_FILE = "metrics.csv"
PICTURE_FILE = "loss.png"

# Every other column is a metric, such as accuracy.
KNOWN_COLUMNS = {
    "step",
    "epoch",
    "samples_seen",
    "split",
    "loss",
    "learning_rate",
    "grad_norm",
    "samples_per_second",
    "gpu_memory_gb",
    "gpu_utilization",
    "elapsed_seconds",
}
BLUE, ORANGE, GREEN, PURPLE = "#2563eb", "#ea580c", "#059669", "#7c3aed"
GREY, RED = "#64748b", "#dc2626"
SMOOTH_FROM = 40  # points; fewer are clearer as they are


@dataclass
class Curve:
    """Values of one column over optimizer steps; a value may be NaN or infinite."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def at(self, step: int) -> float | None:
        """The value at exactly this step."""
        return next((v for s, v in zip(self.steps, self.values, strict=True) if s == step), None)


@dataclass
class Metrics:
    """A run's `metrics.csv` by split (train, eval) and column."""

    run_name: str
    curves: dict[tuple[str, str], Curve]
    metric_names: list[str]
    best_step: int | None = None  # of the checkpoint that the pointer `best` names

    def curve(self, split: str, column: str) -> Curve:
        """The column's values in the split; empty when there is none."""
        return self.curves.get((split, column), Curve())

    @property
    def last_step(self) -> int:
        """The newest step of all."""
        return max(curve.steps[-1] for curve in self.curves.values())


def read_metrics(path: Path) -> Metrics:
    """Read a `metrics.csv`; rows and cells that make no sense are passed over.

    Raises: UserError when the file is missing or holds no values.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        others = ", ".join(folder.name for folder in find_runs(path.parent.parent)[:5])
        raise UserError(
            f"{path} does not exist: no such run, or no step logged yet"
            + (f" (runs here: {others})" if others else "")
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    # Without its line break the last row may be half written, and 0.12 the start of 0.1234.
    complete = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(complete.replace("\0", "")))
    columns = [name for name in reader.fieldnames or () if name]
    curves: dict[tuple[str, str], Curve] = {}
    for row in reader:
        step = _number(row.get("step"))
        if step is None or not math.isfinite(step):
            continue
        for name in columns:
            value = None if name in ("step", "split") else _number(row.get(name))
            if value is not None:
                curve = curves.setdefault((row.get("split") or "train", name), Curve())
                curve.steps.append(int(step))
                curve.values.append(value)
    if not curves:
        raise UserError(f"{path} holds no values yet: wait for the first logged step")
    metric_names = [name for name in columns if name not in KNOWN_COLUMNS]
    return Metrics(path.absolute().parent.name, curves, metric_names, _best_step(path.parent))


def _number(cell: str | None) -> float | None:
    try:
        return float(cell or "")
    except (TypeError, ValueError):
        return None


def _best_step(run_dir: Path) -> int | None:
    try:
        return int((run_dir / "best").read_text(encoding="utf-8").strip().rpartition("-")[2])
    except (OSError, ValueError):
        return None


def summarize(metrics: Metrics) -> str:
    """The run in one line."""
    parts = [f"step {metrics.last_step:,}"]
    for column in ["loss", *metrics.metric_names]:
        for split in ("train", "eval"):
            if curve := metrics.curve(split, column):
                parts.append(f"{split} {column} {curve.last:.4g}")
    if speeds := metrics.curve("train", "samples_per_second"):
        parts.append(f"{speeds.last:,.0f} samples/s")
    return f"{metrics.run_name}: " + ", ".join(parts)


def draw_curves(csv_path: Path | str, png_path: Path | str) -> None:
    """Draw a `metrics.csv` into a PNG file, which appears whole or not at all.

    Raises: UserError when there is nothing to draw or the picture cannot be written.
    """
    _write(Path(png_path), render(read_metrics(Path(csv_path))))


def render(metrics: Metrics) -> bytes:
    """The picture as PNG."""
    picture = io.BytesIO()
    draw_figure(metrics).savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def draw_figure(metrics: Metrics) -> "Figure":
    """One panel each for loss, metrics, learning rate and throughput, where there are values."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    panels: dict[str, Callable[[Axes, Metrics], None]] = {"loss": _draw_loss}
    panels |= {name: partial(_draw_metric, name=name) for name in metrics.metric_names}
    panels |= {"learning_rate": _draw_learning_rate, "samples_per_second": _draw_throughput}
    present = {column for _, column in metrics.curves}
    chosen = [draw for column, draw in panels.items() if column in present]

    across = max(min(len(chosen), 2), 1)
    down = max(math.ceil(len(chosen) / across), 1)
    with rc_context(STYLE):
        # The object API: pyplot would look for a display and keep every figure.
        figure = Figure(figsize=(5.5 * across, 3.1 * down + 0.8), layout="constrained")
        name, _, figures = summarize(metrics).rpartition(": ")
        title = {"x": 0.012, "ha": "left", "parse_math": False}  # a `$` in a name is no formula
        figure.suptitle(name, fontsize=14, fontweight="bold", **title)
        figures = "\n".join(textwrap.wrap(figures, 75 * across))
        figure.supxlabel(figures, fontsize=9, color=GREY, **title)
        grid = figure.subplots(down, across, squeeze=False)
        for axes, draw in zip_longest(grid.flat, chosen):
            if draw is None:
                axes.set_visible(False)
                continue
            draw(axes, metrics)
            axes.set_xlim(0, 1.03 * max(metrics.last_step, 1))  # panels below each other line up
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": GREY,
    "axes.edgecolor": "#cbd5e1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def _draw_loss(axes: "Axes", metrics: Metrics) -> None:
    axes.set_title("loss")
    train = metrics.curve("train", "loss")
    if len(train.steps) > SMOOTH_FROM:
        axes.plot(train.steps, train.values, color=BLUE, alpha=0.25, linewidth=1)
        axes.plot(train.steps, smooth(train.values), color=BLUE, label="train (smoothed)")
    else:
        _draw_curve(axes, train, BLUE, "train")
    _draw_curve(axes, metrics.curve("eval", "loss"), ORANGE, "eval", dots=True)
    bad = next((s for s, v in zip(train.steps, train.values, strict=True) if v != v), None)
    if bad is not None:
        axes.axvline(bad, color=RED, linewidth=1, label=f"not a number from step {bad:,}")
    axes.legend()


def _draw_metric(axes: "Axes", metrics: Metrics, name: str) -> None:
    axes.set_title(name)
    _draw_curve(axes, metrics.curve("train", name), BLUE, "train")
    evaluated = metrics.curve("eval", name)
    _draw_curve(axes, evaluated, ORANGE, "eval", dots=True)
    if metrics.best_step is not None and (best := evaluated.at(metrics.best_step)) is not None:
        label = f"best checkpoint: {best:.4g}"
        axes.plot(metrics.best_step, best, "*", color=ORANGE, markersize=13, label=label)
    axes.legend()


def _draw_learning_rate(axes: "Axes", metrics: Metrics) -> None:
    axes.set_title("learning rate")
    _draw_curve(axes, metrics.curve("train", "learning_rate"), PURPLE)
    axes.set_ylim(bottom=0)


def _draw_throughput(axes: "Axes", metrics: Metrics) -> None:
    axes.set_title("throughput")
    axes.set_ylabel("samples per second")
    speed = metrics.curve("train", "samples_per_second")
    _draw_curve(axes, speed, GREEN)
    axes.set_ylim(0, _headroom(speed))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if memory := metrics.curve("train", "gpu_memory_gb"):
        right = axes.twinx()
        right.grid(False)
        right.set_ylabel("GPU memory in GB (dashed)")
        _draw_curve(right, memory, GREY, dashed=True)
        right.set_ylim(0, 1.6 * _headroom(memory))  # below the speed, where both are steady


def _headroom(curve: Curve) -> float:
    """Upper end of an axis from zero that leaves air above the curve."""
    return 1.25 * max((value for value in curve.values if math.isfinite(value)), default=0) or 1


def _draw_curve(
    axes: "Axes",
    curve: Curve,
    color: str,
    label: str | None = None,
    dots: bool = False,
    dashed: bool = False,
) -> None:
    if curve:
        # One point makes no line, and many dots make one anyway.
        marker = "o" if len(curve.steps) == 1 or (dots and len(curve.steps) <= 60) else ""
        style = "--" if dashed else "-"
        axes.plot(
            curve.steps, curve.values, style, color=color, marker=marker, markersize=4, label=label
        )


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window around each value, a twentieth of all wide; gaps stay gaps."""
    reach = max(len(values) // 40, 1)
    finite = [math.isfinite(value) for value in values]
    kept = (value if good else 0.0 for value, good in zip(values, finite, strict=True))
    sums = [0.0, *accumulate(kept)]
    counts = [0, *accumulate(finite)]
    smoothed = []
    for i, good in enumerate(finite):
        start, end = max(i - reach, 0), min(i + reach + 1, len(values))
        mean = (sums[end] - sums[start]) / max(counts[end] - counts[start], 1)
        smoothed.append(mean if good else math.nan)
    return smoothed


def _write(path: Path, picture: bytes) -> None:
    """Write beside the target, then rename, so that a viewer never sees half a picture."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(picture)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def find_runs(checkpoint_dir: Path) -> list[Path]:
    """Folders below `checkpoint_dir` that hold metrics, the most recently written first."""
    files = checkpoint_dir.glob(f"*/{METRICS_FILE}")
    return [file.parent for file in sorted(files, key=lambda f: f.stat().st_mtime, reverse=True)]


def default_checkpoint_dir() -> Path:
    """Where runs are kept: $CHECKPOINT_DIR, else ./checkpoints."""
    return Path(os.environ.get("CHECKPOINT_DIR") or "checkpoints")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw one run. Raises: UserError when there is no run or nothing in it."""
    parser = argparse.ArgumentParser(description="Draw the curves of a run.")
    parser.add_argument("--run_name", metavar="NAME", help="default: the run written to last")
    parser.add_argument(
        "--checkpoint_dir",
        type=Path,
        default=default_checkpoint_dir(),
        metavar="DIR",
        help="where runs are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the picture, - for standard output (default: {PICTURE_FILE} in the run's folder)",
    )
    arguments = parser.parse_args(argv)
    run_dir = choose_run(arguments.checkpoint_dir, arguments.run_name)
    metrics = read_metrics(run_dir / METRICS_FILE)
    picture = render(metrics)
    if arguments.output == "-":
        print(summarize(metrics), file=sys.stderr)
        sys.stdout.buffer.write(picture)
        return
    output = Path(arguments.output or run_dir / PICTURE_FILE)
    _write(output, picture)
    print(f"{summarize(metrics)}\n{output}")


def choose_run(checkpoint_dir: Path, run_name: str | None = None) -> Path:
    """Folder of a run, by default of the one written to last; raises UserError without any."""
    if run_name:
        return checkpoint_dir / run_name
    runs = find_runs(checkpoint_dir)
    if not runs:
        raise UserError(f"no run in {checkpoint_dir} yet: start one with `make train`")
    return runs[0]


if __name__ == "__main__":
    run(main)
