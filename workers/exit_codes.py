"""Exit statuses of a worker: the supervisor tells a worker that cannot start from one that crashed."""

from typing import Final

STOPPED: Final = 0
"""Asked to stop, current copies finished."""

BOOT_FAILED: Final = 3
"""The device could not be opened or a kernel gave a wrong answer: starting again at once will not help."""

DEVICE_LOST: Final = 4
"""A sticky device error: the context is of no more use, a fresh process is needed."""

SUPERVISOR_LOST: Final = 5
"""The lifeline ended or the parent was gone."""

BAD_COMMAND: Final = 6
"""The supervisor sent something that is no command of this version."""

INTERNAL: Final = 7
"""An exception that nothing expected ended the loop."""
