"""Ranks that fail together: what goes wrong on one of them ends all with the same sentence.

A rank that leaves alone would let the others wait for it in their next collective operation.
"""

import errno
from types import TracebackType

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from .errors import UserError


class FailTogether:
    """Context in which each rank may fail to read or write. Collective at its end.

    Args:
        what: begins the sentence about a failure of the system, such as "could not save x".
    Raises: UserError on every rank when one of them met a UserError or an error of the system.
    """

    def __init__(self, accelerator: Accelerator, what: str) -> None:
        self.accelerator = accelerator
        self.what = what

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
            # torch and safetensors report a full disk by errors of their own.
            sentence = f"{self.what}: {describe(error)}"
        elif error is not None:
            return False
        sentences = gather_object([sentence])
        first = next((one for one in sentences if one), None)
        if first:
            raise UserError(first) from error
        return True


def agree(accelerator: Accelerator, value: bool) -> bool:
    """The main process's answer, on all ranks. Collective."""
    answer = [value]
    broadcast_object_list(answer)
    return bool(answer[0])


def describe(error: BaseException) -> str:
    """What went wrong with a volume, and what to do, in a few words."""
    number = getattr(error, "errno", None)
    text = " ".join(str(error).split())
    if number is None and ("No space left" in text or "os error 28" in text):
        number = errno.ENOSPC
    return ADVICE.get(number or 0, text or type(error).__name__)


ADVICE = {
    errno.ENOSPC: "the volume is full: free some space, or lower keep_last",
    errno.EDQUOT: "the quota is used up: free some space, or lower keep_last",
    errno.EROFS: "the volume is read-only: mount it writable",
    errno.EACCES: "permission denied: make the folder writable for this user",
}
