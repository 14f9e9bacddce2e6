"""Failures that end in a coded reply."""

from collections.abc import Mapping

from stratad.errors import CODES


class Refusal(Exception):
    """A request cannot be served: becomes a `Failed` reply at the one border, `Core.request`.

    Attributes:
        code: a key of `stratad.errors.CODES`.
        message: says what was wrong and what was expected.
        stage: the stage to blame, or -1.
        detail: further named values.
    """

    def __init__(self, code: str, message: str, *, stage: int = -1, detail: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        assert code in CODES, code
        self.code = code
        self.message = message
        self.stage = stage
        self.detail = dict(detail or {})


class InvalidTransition(Exception):
    """A state machine was asked for a move that its table does not have: a bug of ours. Nothing was changed."""

    def __init__(self, subject: str, state: str, event: str) -> None:
        super().__init__(f"{subject}: no move on {event!r} from {state!r}")
        self.subject = subject
        self.state = state
        self.event = event
