"""What the main process says: on the terminal, and with times in the run's `train.log`."""

import logging
import sys
from pathlib import Path

logger = logging.getLogger(__package__)


class _TerminalHandler(logging.Handler):
    """Writes above the progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        bar = sys.modules.get("tqdm")
        if bar is not None and sys.stdout.isatty():
            bar.tqdm.write(self.format(record))
        else:
            print(self.format(record), flush=True)


def start_logging(is_main_process: bool, run_dir: Path | None = None) -> None:
    """Send the log to the terminal and, given a run folder, append it to `train.log`.

    Other ranks stay silent up to warnings.
    """
    # Shared weights are saved once and shared again on loading: nothing to say at each save.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO if is_main_process else logging.ERROR)
    logger.addHandler(_TerminalHandler())
    if is_main_process and run_dir is not None:
        file = logging.FileHandler(run_dir / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)
