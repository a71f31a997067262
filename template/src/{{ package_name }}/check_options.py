"""The options of a run, looked at before it waits in a queue. Nothing is trained."""

import argparse
from pathlib import Path

from .config import load_config, per_device_batch_size
from .errors import UserError, run
from .train import options_of_training


def main() -> int:
    """Check the options of `train`, once or together with each line of a file."""
    parser = argparse.ArgumentParser(prog="check_options", description=main.__doc__)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--lines", type=Path, help="further options, one run a line")
    arguments, options = parser.parse_known_args()
    lines = arguments.lines.read_text(encoding="utf-8").splitlines() if arguments.lines else [""]
    for number, line in enumerate(lines, 1):
        try:
            config, _ = load_config([*options, *line.split()], extra=options_of_training())
            per_device_batch_size(config, arguments.num_processes)
        except UserError as error:
            where = f"line {number}: " if arguments.lines else ""
            raise UserError(f"{where}{error}") from error
    return 0


if __name__ == "__main__":
    run(main)
