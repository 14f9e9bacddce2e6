"""An event told to the core, and what it says carried out, both at the instant of the loop's turn."""

import logging
import time
from collections.abc import Callable, Iterable

from ipc.logs import fields
from stratad.core.core import Core
from stratad.core.effects import Effect
from stratad.core.state import Instant

log = logging.getLogger(__name__)


class Turn:
    """The core as the parts of the supervisor speak to it. A bug of ours, in an event or in an effect, must not end the
    daemon and every image in it: it costs that event, or that effect.

    `carry_out` performs one effect; `failed` answers for one that could not be; `afterwards` is called when the effects
    of an event, and of all events that these brought, are done.
    """

    def __init__(
        self,
        core: Core,
        carry_out: Callable[[Effect], None],
        failed: Callable[[Effect], None],
        afterwards: Callable[[], None],
    ) -> None:
        self.core = core
        self.now = Instant(0.0, 0.0)
        self._carry_out = carry_out
        self._failed = failed
        self._afterwards = afterwards
        self._depth = 0

    def tell_time(self) -> Instant:
        """Read the clocks; the whole turn happens at this instant."""
        self.now = Instant(time.monotonic(), time.time())
        return self.now

    def event(self, event: Callable[[Instant], list[Effect]]) -> None:
        """Tell the core something and do what it says."""
        try:
            effects = event(self.now)
        except Exception:  # noqa: BLE001 - see the class
            self.bug("event", getattr(event, "__name__", "event"))
            return
        self.perform(effects)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carry effects out, in order."""
        self._depth += 1
        try:
            for effect in effects:
                try:
                    self._carry_out(effect)
                except Exception:  # noqa: BLE001 - see the class
                    self.bug("effect", type(effect).__name__)
                    self._failed(effect)
        finally:
            self._depth -= 1
        if not self._depth:
            self._afterwards()

    def bug(self, what: str, name: str) -> None:
        """Note the exception in hand."""
        self.core.state.count("internal_errors")
        log.exception("%s could not be handled", what, extra=fields(message_type=name))
