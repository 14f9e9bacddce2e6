"""What one check of ``stratactl doctor`` found."""

from dataclasses import dataclass, field
from enum import Enum

from stratad.ctl.output import JsonObject


class State(Enum):
    """How good a finding is, from good to bad."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do and is empty only where nothing is to be done."""

    name: str
    state: State
    what: str
    fix: str = ""
    data: JsonObject = field(default_factory=dict)

    def as_json(self) -> JsonObject:
        """The finding as a JSON object."""
        return {"name": self.name, "state": self.state.value, "what": self.what, "fix": self.fix, **self.data}
