"""One-line changes of the rules, each of which an invariant must catch: the proof that the simulator looks.

A mutant replaces one whole line of a module of the core. Where that line is not there exactly once, the mutant is out
of date, which is an error too: it must follow the code.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[3]
# Everything that holds classes or functions of the core, and so must be loaded again with it.
RELOADED: Final = ("stratad.core", "tests.support.simulation")


class Mutant(NamedTuple):
    """A rule that is broken: in `module`, the line `old` becomes `new`. An invariant must catch it within the first
    `seeds` seeds.
    """

    name: str
    module: str
    old: str
    new: str
    seeds: int = 600


class StaleMutant(Exception):
    """The line that a mutant changes is not there exactly once."""


def patched(mutant: Mutant, source: str) -> str:
    """The module's source with the one line changed.

    Raises:
        StaleMutant: it is not there exactly once.
    """
    lines = source.split("\n")
    found = [at for at, line in enumerate(lines) if line == mutant.old]
    if len(found) != 1:
        raise StaleMutant(f"mutant {mutant.name!r}: {mutant.module} has its line {len(found)} times")
    lines[found[0]] = mutant.new
    return "\n".join(lines)


def source_of(module: str) -> str:
    """A module's source as it is."""
    return (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


class _Loader(importlib.abc.SourceLoader):
    """Loads the changed source in place of the file."""

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return f"<{self._module}, changed>"

    def get_data(self, path: str) -> bytes:
        return self._source.encode()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._source = patched(mutant, source_of(mutant.module))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, self._source))


def install(mutant: Mutant) -> None:
    """From now on this process has the changed core. There is no way back: it is a process of its own."""
    finder = _Finder(mutant)
    keep = __name__
    for name in [name for name in sys.modules if name.startswith(RELOADED) and name != keep]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)


MUTANTS: Final[tuple[Mutant, ...]] = (
    # --- extents -----------------------------------------------------------------------------------------------------
    Mutant(
        "a put is published while a part of it is still copied",
        "stratad.core.puts",
        "        return not self.copying and self.begun_rows == self.row_count",
        "        return self.begun_rows == self.row_count",
    ),
    Mutant(
        "a hung worker's extents and rows are free before its end is proven",
        "stratad.core.jobs",
        '            arenas.kill(state, worker, "worker_hung", f"job {min(late)} passed its deadline", excused=False)',
        '            arenas.kill(state, worker, "worker_hung", "late"); worker_gone(state, worker, "worker_hung", "late")',  # noqa: E501
    ),
    Mutant(
        "a group that is there is told of another stage",
        "stratad.core.jobs",
        '                state.reply(op.client, Progress(op.seq, "group", stage, report.group))',
        '                state.reply(op.client, Progress(op.seq, "group", len(op.stages) - 1 - stage, report.group))',
    ),
    Mutant(
        "a worker's death is held against what only waited for its turn there",
        "stratad.core.blame",
        "        if (known is None or job in known) and (not hung or op.reads_rows in hung):",
        "        if not hung or op.reads_rows in hung:",
    ),
    Mutant(
        "extents of a dropped image are free although a restore reads them",
        "stratad.core.catalog",
        "        if chunk.reads:",
        "        if False:",
    ),
    Mutant(
        "extents of duplicate chunks are lost",
        "stratad.core.catalog",
        "                    self.arenas[worker].free(place.extents)",
        "                    pass",
    ),
    Mutant(
        "the last granule of what is freed is forgotten",
        "stratad.core.arena",
        "            count = extent.length_bytes // GRANULE_BYTES",
        "            count = max(extent.length_bytes // GRANULE_BYTES - 1, 1)",
    ),
    Mutant(
        "references are counted as one",
        "stratad.core.catalog",
        "                chunk.references += 1",
        "                chunk.references = 1",
    ),
    # --- workers ------------------------------------------------------------------------------------------------------
    Mutant(
        "the next worker is started before the former is gone",
        "stratad.core.arenas",
        "    worker.state = WorkerState.KILLED",
        "    worker.state = WorkerState.DEAD",
    ),
    Mutant(
        "a worker that was told to die is given jobs",
        "stratad.core.state",
        "        return self.state is WorkerState.READY and self.life.leaving_s == math.inf",
        "        return self.state in (WorkerState.READY, WorkerState.KILLED)",
        seeds=3000,
    ),
    Mutant(
        "a new worker is believed to map what the former did",
        "stratad.core.core",
        "        worker.mapped.clear()",
        "        pass",
    ),
    Mutant(
        "the jobs of a dead worker are forgotten",
        "stratad.core.core",
        '        jobs.worker_gone(state, worker, code, f"worker {name} (pid {worker.pid}): {reason}")',
        "        pass",
    ),
    Mutant(
        "a shuttle that was never finished stays in /dev/shm",
        "stratad.core.arenas",
        "        state.out.append(UnlinkSegment(segment_name(state.settings.instance, worker.name, worker.making)))",
        "        pass",
        seeds=2000,
    ),
    # --- rows ---------------------------------------------------------------------------------------------------------
    Mutant(
        "rows are told free when the first stage has read them",
        "stratad.core.jobs",
        "    if StageState.FREE in states and states <= {StageState.FREE, StageState.DONE} and not op.told_free:",
        "    if StageState.FREE in states and not op.told_free:",
    ),
    Mutant(
        "fences are lowered when an operation is cancelled",
        "stratad.core.jobs",
        "            state.out.append(SendTo(run.worker, CancelJob(run.job)))",
        "            state.out.append(SendTo(run.worker, CancelJob(run.job))); ends.lower_fence(state, op, run.stage)",
    ),
    Mutant(
        "a cancelled operation is answered before its workers have",
        "stratad.core.jobs",
        "    op.cancelled = True",
        '    op.cancelled = True; state.reply(op.client, ends.Failed(op.seq, "cancelled", "at once"))',
    ),
    Mutant(
        "rows that a killed worker may have written are not told",
        "stratad.core.jobs",
        "        _fail_stage(state, op, run, code, message, rows_undefined=written.packed if written is not None else ())",  # noqa: E501
        "        _fail_stage(state, op, run, code, message, rows_undefined=())",
        seeds=2000,
    ),
    Mutant(
        "a writer may share rows with readers",
        "stratad.core.fences",
        "            if not (fence.writes or other.writes):",
        "            if not (fence.writes and other.writes):",
    ),
    # --- images -------------------------------------------------------------------------------------------------------
    Mutant(
        "pinned images are evicted",
        "stratad.core.images",
        "        return not (self.pinned or self.readers or self.taken)",
        "        return not (self.readers or self.taken)",
    ),
    Mutant(
        "images that are being read are evicted",
        "stratad.core.images",
        "        return not (self.pinned or self.readers or self.taken)",
        "        return not (self.pinned or self.taken)",
    ),
    Mutant(
        "images that are being taken are evicted",
        "stratad.core.images",
        "        return not (self.pinned or self.readers or self.taken)",
        "        return not (self.pinned or self.readers)",
    ),
    Mutant(
        "a take gives the image up before the client has acknowledged",
        "stratad.core.ends",
        "        engine.takes[image.image_id] = state.now_s  # `taken` stays up until the client acknowledges or is gone",  # noqa: E501
        "        state.catalog.drop(image)",
    ),
    Mutant(
        "what an engine has taken is given up for another one at once",
        "stratad.core.leases",
        "    due_s = state.now_s - state.settings.lease_s",
        "    due_s = state.now_s",
        seeds=2000,
    ),
    Mutant(
        "an image that supersedes a pinned one is not pinned",
        "stratad.core.catalog",
        "            image.pinned = previous.pinned",
        "            pass",
    ),
    Mutant(
        "a failed stage does not fail a restore",
        "stratad.core.ends",
        "    failed = _cause(op)",
        "    failed = _cause(op) if op.captures else None",
    ),
    Mutant(
        "one token more is told captured than was",
        "stratad.core.ends",
        "    state.reply(op.client, Captured(op.seq, image.image_id, op.token_count, image_bytes, new_bytes, op.outcomes))",  # noqa: E501
        "    state.reply(op.client, Captured(op.seq, image.image_id, op.token_count + 1, image_bytes, 0, op.outcomes))",
    ),
    # --- hints --------------------------------------------------------------------------------------------------------
    Mutant(
        "tokens are trusted: what is hinted matches without a comparison",
        "stratad.core.hints",
        "        or chunk.key.digest != digests[number]",
        "        or False",
    ),
    Mutant(
        "what is hinted is published although the rows hold something else",
        "stratad.core.jobs",
        "    if not run.missed:",
        "    if True:",
    ),
    Mutant(
        "hinted chunks are not held",
        "stratad.core.catalog",
        "                chunk.reads += 1",
        "                pass",
        seeds=2000,
    ),
    Mutant(
        "the extents of hinted chunks are freed with a capture that failed",
        "stratad.core.catalog",
        "                self._end_hold(chunk)",
        "                self.arenas[chunk.key.worker].free(chunk.place.extents)",
        seeds=2000,
    ),
    Mutant(
        "hinted chunks that were missed are held for good",
        "stratad.core.catalog",
        "            self._end_hold(staged.hinted[stage].pop(number))",
        "            staged.hinted[stage].pop(number)",
    ),
    Mutant(
        "the image takes over a hold on a hinted chunk without a reference",
        "stratad.core.catalog",
        "        chunk.references += 1",
        "        chunk.references += 0",
        seeds=2000,
    ),
    Mutant(
        "slot_from restores the transit image of any slot",
        "stratad.core.intake",
        "    image = engine.transits.get(request.source_slot)",
        "    image = next(iter(engine.transits.values()), None)",
        seeds=2000,
    ),
    # --- damage -------------------------------------------------------------------------------------------------------
    Mutant(
        "an image with a damaged chunk is not flagged",
        "stratad.core.jobs",
        '    if report.code == "damaged" and 0 <= report.chunk < len(stored):',
        '    if report.code == "broken" and 0 <= report.chunk < len(stored):',
        seeds=2000,
    ),
    Mutant(
        "the next capture is deduplicated against a damaged chunk",
        "stratad.core.catalog",
        "        if self.chunks.get(chunk.key) is chunk:",
        "        if False:",
        seeds=2000,
    ),
    Mutant(
        "further damage of an image that is damaged already is not recorded",
        "stratad.core.jobs",
        "        journaling.record_flags(state, holders)",
        "        journaling.record_flags(state, flagged)",
        seeds=6000,
    ),
    Mutant(
        "damaged images are found by their tokens",
        "stratad.core.catalog",
        "            if image.findable and image.image_id in self.images:",
        "            if image.findable and image.image_id in self.transits:",
        seeds=2000,
    ),
    # --- the journal --------------------------------------------------------------------------------------------------
    Mutant(
        "a client is told of an image before its record is written",
        "stratad.core.journaling",
        "    append(state, [record], written, not_written)",
        "    written(state); append(state, [record], lambda _: None, lambda _state, _error: None)",
    ),
    Mutant(
        "the end of an image is not recorded",
        "stratad.core.journaling",
        "    append(state, records, written, otherwise)",
        "    written(state)",
    ),
    Mutant(
        "what could not be written counts as written",
        "stratad.core.journaling",
        "    if error:",
        "    if False:",
    ),
    Mutant(
        "a record does not end the image that it supersedes",
        "stratad.core.journaling",
        "        supersedes=previous.image_id if previous is not None else 0,",
        "        supersedes=0,",
    ),
    Mutant(
        "a record forgets the pin of the image that it supersedes",
        "stratad.core.journaling",
        "        pinned=previous is not None and previous.pinned,",
        "        pinned=False,",
    ),
    Mutant(
        "a process captures that the journal does not name",
        "stratad.core.queue",
        "        if not state.workers[name].recorded:",
        "        if False:",
        seeds=2000,
    ),
    # --- the next daemon ----------------------------------------------------------------------------------------------
    Mutant(
        "a worker is started while the former daemon's still lives",
        "stratad.core.adoption",
        "            worker.state = WorkerState.AWAITING",
        "            pass",
    ),
    Mutant(
        "former workers that hang are not killed",
        "stratad.core.adoption",
        "    state.out.append(KillFormer(worker.name))",
        "    pass",
        seeds=3000,
    ),
    Mutant(
        "what was superseded comes back with the next daemon",
        "stratad.core.records",
        "                images.pop(record.supersedes, None)",
        "                pass",
    ),
    Mutant(
        "what was dropped comes back with the next daemon",
        "stratad.core.records",
        "                    images.pop(image_id, None)",
        "                    pass",
    ),
    Mutant(
        "adopted chunks are counted as referenced once",
        "stratad.core.catalog",
        "            chunk.references += 1",
        "            chunk.references = 1",
        seeds=2000,
    ),
    Mutant(
        "known damage is forgotten with the daemon",
        "stratad.core.catalog",
        "        image.damaged = any(chunk.damaged for chunk in image.chunks())",
        "        image.damaged = False",
        seeds=3000,
    ),
    Mutant(
        "shuttles are written although a process lives whose end cannot be proven",
        "stratad.core.adoption",
        "    sealed = worker.name in legacy.journal.workers and not legacy.same_pids",
        "    sealed = False",
        seeds=3000,
    ),
    Mutant(
        "a shuttle that a former worker made late stays in /dev/shm",
        "stratad.core.adoption",
        "        if index not in worker.sizes:",
        "        if False:",
        seeds=3000,
    ),
    # --- the trace ----------------------------------------------------------------------------------------------------
    Mutant(
        "what was noted of a job stays when its operation has ended",
        "stratad.core.trace",
        "        noted_s = ring.sent_s.pop(run.job, run.sent_s)",
        "        noted_s = ring.sent_s.get(run.job, run.sent_s)",
    ),
    Mutant(
        "the time before a stage was sent is not told",
        "stratad.core.trace",
        "        queue_s=(sent_s if sent else entry.replied_s) - entry.created_s,",
        "        queue_s=0.0,",
    ),
    # --- orders of admins, lost segments ------------------------------------------------------------------------------
    Mutant(
        "a capture publishes into an arena that is reset",
        "stratad.core.lives",
        '            op.lost = ("worker_died", f"the arena of worker {worker.name} is reset")',
        "            pass",
        seeds=2000,
    ),
    Mutant(
        "images of a lost segment stay",
        "stratad.core.losses",
        "    if images:",
        "    if False:",
        seeds=2000,
    ),
)
