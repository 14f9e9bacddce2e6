"""One cell of the fault matrix: what was done, and what was found."""

from dataclasses import dataclass, field

from stratad.ctl.output import JsonObject


@dataclass
class Cell:
    """What one cell found. `problems` are what must not be; a cell without any has passed."""

    op: str
    stage: int | None
    fault: str
    error: str = ""
    recovered_s: float | None = None
    byte_exact: bool = False
    pids_before: dict[str, int] = field(default_factory=dict)
    pids_after: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    more: JsonObject = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything is as it must be."""
        return self.byte_exact and not self.problems

    def expect(self, ok: bool, problem: str) -> None:
        """Note a problem unless all is well."""
        if not ok:
            self.problems.append(problem)

    def as_json(self) -> JsonObject:
        """The cell as the report has it."""
        return {
            "op": self.op,
            "stage": self.stage,
            "fault": self.fault,
            "error": self.error,
            "recovered_s": None if self.recovered_s is None else round(self.recovered_s, 4),
            "byte_exact": self.byte_exact,
            "pids_before": dict(self.pids_before),
            "pids_after": dict(self.pids_after),
            "passed": self.passed,
            "problems": list(self.problems),
            **self.more,
        }
