"""Ranks that fail together: what goes wrong on one of them ends all with the same sentence.

A rank that leaves alone would let the others wait for it in their next collective operation.
"""

from pathlib import Path
from types import TracebackType

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from .errors import UserError, describe


class FailTogether:
    """Context in which each rank may fail to read or write. Collective at its end.

    Args:
        what: begins the sentence about a failure of the system, such as "could not save x".
        volume: an existing folder on the volume that is written to.
    Raises: UserError on every rank when one of them met a UserError or an error of the system.
    """

    def __init__(self, accelerator: Accelerator, what: str, volume: Path | None = None) -> None:
        self.accelerator = accelerator
        self.what = what
        self.volume = volume

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        sentence = None
        if isinstance(error, UserError):
            sentence = str(error)
        elif isinstance(error, OSError | RuntimeError | SafetensorError):
            sentence = f"{self.what}: {describe(error, self.volume)}"
        elif error is not None:
            return False
        sentences = gather_object([sentence])
        first = next((one for one in sentences if one), None)
        if first:
            raise UserError(first) from error
        return True
