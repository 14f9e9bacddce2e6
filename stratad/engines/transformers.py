"""Parking the conversations of a transformers model whose layers are split over stages.

A `CacheParker` owns one pool a stage. `park` copies a cache into a slot's rows and state slots and captures them;
`restore` has the daemon fill a slot and makes a new cache of it, of the same kind. A cache never shares memory with a
pool, so a conversation may go on while its capture runs, and a slot is busy only as long as its last operation. It also
means that there is nothing here to be marked clean: what an engine that died had not parked was in the model's own
memory, which no worker maps::

    cache --write--> rows, state of the slot --capture--> image --restore--> rows, state of the slot --read--> cache

Which kinds of layers there are, and what is parked of each, stands in `stratad.engines.layer_kinds`. A kind that is not
known is refused by its name, because its tensors may not be all there is to restore.

A state (linear attention) exists at the newest token only. `park` makes a checkpoint of it there; `checkpoint` keeps
one of an earlier token, and the next `park` of the same cache takes it along. An image can be restored at its
checkpoints, and without states at any token that no window has passed.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

try:
    import torch
    from transformers import Cache, DynamicCache, PreTrainedModel
except ModuleNotFoundError as exc:
    from stratad.engines.libraries import not_installed

    raise not_installed(exc) from exc

from shm.layout import StageLayout
from stratad.client import GroupRows
from stratad.engines.checkpoints import KeptStates
from stratad.engines.kv_planes import (
    LayerContent,
    LayerForm,
    StagePlanes,
    layout_for,
    pool_bytes_for,
    state_bytes,
    token_bytes,
)
from stratad.engines.model_layers import (
    NewCache,
    check_cache,
    contents_of,
    fill_cache,
    fingerprint_of,
    observe_layers,
    room_of,
    split_layers,
)
from stratad.engines.parking import CaptureTicket, Found, ParkingClient, ParkingEngine, RestoreTicket
from stratad.errors import Busy, UsageError
from stratad.pools import CpuPool, StagePool

DEFAULT_DEADLINE_S: Final = 30.0


class CacheParker:
    """Parks and restores the caches of one model. Owns its pools; used by one thread at a time.

    Attributes:
        slots, max_tokens: slots of every pool, and the tokens that one holds.
        stage_devices: the device of every stage, as it was registered.
        token_bytes, state_bytes: bytes of one token and of one state over all stages.
    """

    def __init__(
        self,
        engine: ParkingEngine,
        planes: Sequence[StagePlanes],
        stages: Sequence[StagePool],
        *,
        new_cache: NewCache,
        kept: KeptStates,
        slots: int,
        max_tokens: int,
    ) -> None:
        """Use `register`; this takes what that has made."""
        self._forms: Final = [form for stage in planes for form in stage.forms]
        self.slots: Final = slots
        self.max_tokens: Final = max_tokens
        self.stage_devices: Final = tuple(stage.device for stage in stages)
        self.token_bytes: Final = token_bytes(self._forms)
        self.state_bytes: Final = state_bytes(self._forms)
        self._engine: Final = engine
        self._planes: Final = tuple(planes)
        self._pools: Final = tuple(_cpu_pools(stages))
        self._new_cache: Final = new_cache
        self._kept: Final = kept
        self._last: dict[int, CaptureTicket | RestoreTicket] = {}  # by slot: what may still touch its rows

    @classmethod
    def register(
        cls,
        client: ParkingClient,
        model: PreTrainedModel,
        *,
        namespace: str,
        revision: str,
        max_tokens: int,
        stages: int = 2,
        slots: int = 1,
        devices: Sequence[str] = (),
        name: str = "transformers",
        new_cache: NewCache | None = None,
        kept_checkpoints: int = 1,
    ) -> Self:
        """Allocate the pools and register them. Where the model itself needs the memory that an engine which has died
        left behind, say `Client.announce` before it is loaded; here it is said for the pools.

        Args:
            client: a connected client.
            model: a causal model in its final place and element type; one token is run through it to see its cache.
            namespace: whose conversations these are.
            revision: what tells these weights from others of the same form (a commit, a hash).
            max_tokens: tokens that a slot can hold.
            stages: number of stages. A model that lies on several devices has one stage a device.
            slots: slots of every pool.
            devices: the daemon's device of each stage, for a model on the CPU (default ``cpu:0``, ``cpu:1``, ...).
            name: what the daemon shows as the engine.
            new_cache: makes an empty cache of the kind to be parked (default: a `DynamicCache` of the model).
            kept_checkpoints: earlier states that `checkpoint` can keep for each slot, for a model that has states.

        Raises:
            UsageError: a layer kind, form or split that cannot be parked.
            StratadError: the daemon refused the registration.
        """
        for what, value, least in (("slots", slots, 1), ("max_tokens", max_tokens, 1), ("kept", kept_checkpoints, 0)):
            if value < least:
                raise UsageError("bad_value", f"{what} must be at least {least}, got {value}")
        make = new_cache or (lambda: DynamicCache(config=model.config))
        forms = observe_layers(model, make)
        room = room_of(make())
        if room is not None and room < max_tokens:
            raise UsageError("bad_value", f"max_tokens is {max_tokens}, but the cache holds {room} tokens")
        split = split_layers(forms, stages)
        if devices and len(devices) != len(split):
            raise UsageError("bad_value", f"{len(devices)} devices were named for {len(split)} stages")
        kept = KeptStates(slots, kept_checkpoints if all(form.rewinds for form in forms) else 0)
        fingerprint = fingerprint_of(model, forms, make(), revision)
        client.announce(namespace)
        made: list[StagePool] = []
        planes: list[StagePlanes] = []
        try:
            for number, part in enumerate(split):
                layout = layout_for(
                    part,
                    slots=slots,
                    max_tokens=max_tokens,
                    state_slots=kept.state_slots,
                    chunk_tokens=client.welcome.chunk_tokens,
                )
                made.append(_allocate(layout, _device_of(part), devices[number] if devices else f"cpu:{number}"))
                planes.append(StagePlanes(part, layout, _bytes_of(made[-1]), max_tokens))
                planes[-1].sign()
            engine = client.register(engine=name, namespace=namespace, fingerprint=fingerprint, stages=made)
        except BaseException:
            planes.clear()
            for pool in _cpu_pools(made):
                pool.close()
            raise
        return cls(engine, planes, made, new_cache=make, kept=kept, slots=slots, max_tokens=max_tokens)

    def checkpoint(
        self, cache: Cache, token_ids: Sequence[int], *, slot: int = 0, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        """Keep the state of `cache` after these tokens, which it holds now, for the next `park` of this very cache.

        A slot keeps as many as `kept_checkpoints` of `register` said; the oldest is dropped. A model without states
        needs none, and nothing is done.

        Raises:
            UsageError: the cache is not of the registered form, or nothing can be kept of it.
            Busy: an earlier operation still read the slot's states at the deadline.
        """
        contents = self._contents(cache, token_ids)
        if not self.state_bytes:
            return
        if not self._kept.room:
            raise UsageError("bad_value", "no earlier state can be kept: kept_checkpoints is 0, or the kind of cache")
        self._free_slot(slot, deadline_s)
        state_slot = self._kept.note(slot, cache, token_ids)
        for stage, layers in self._by_stage(contents):
            stage.write_states(state_slot, layers)

    def park(
        self,
        conversation: str,
        cache: Cache,
        token_ids: Sequence[int],
        *,
        slot: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> CaptureTicket:
        """Copy `cache` into the slot and start to capture it; the ticket's `result` waits for the image.

        `token_ids` are the tokens that the cache has read, one for each position. The cache is only read, and on a CPU
        free when this returns; on a GPU the copies are on its current stream, as the model's own work is.

        Raises:
            UsageError: the cache is not of the registered form, or has not read as many tokens.
            Busy: an earlier operation still had the slot's rows at the deadline.
            StratadError: the daemon is lost.
        """
        self._free_slot(slot, deadline_s)
        tokens = len(token_ids)
        for stage, layers in self._by_stage(self._contents(cache, token_ids)):
            stage.write(slot, tokens, layers)
        checkpoints = [*self._kept.of(slot, cache, token_ids), (tokens, slot)] if self.state_bytes else []
        rows = self._rows(slot, tokens)
        ticket = self._engine.capture(
            conversation, token_ids, None, slot, rows_by_stage=rows, checkpoints=checkpoints, deadline_s=deadline_s
        )
        self._last[slot] = ticket
        return ticket

    def restore(
        self,
        conversation: str,
        *,
        slot: int = 0,
        tokens: int | None = None,
        into: Cache | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> tuple[Cache, int]:
        """A cache with the first `tokens` tokens (None: all) of the conversation's image, and how many those are.

        Every byte was verified before it reached the slot. The image stays. The cache is a new one, or `into`: one of
        the registered kind whose former tokens are forgotten; memory of a fixed length is filled in place.

        Raises:
            UsageError: no such conversation or slot; no checkpoint at `tokens` (code ``no_checkpoint``); `into` is of
                another kind, or shorter than the image (code ``bad_rows``).
            Damaged: the image is no longer what was captured: read the prompt again.
            Busy: an earlier operation still had the slot's rows at the deadline.
            StratadError: whatever else the daemon says.
        """
        return self._fetch(self._engine.restore, conversation, slot, tokens=tokens, into=into, deadline_s=deadline_s)

    def take(
        self,
        conversation: str,
        *,
        slot: int = 0,
        into: Cache | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> tuple[Cache, int]:
        """Like `restore` of all tokens, and the image is given up once its bytes are in the slot."""
        return self._fetch(self._engine.take, conversation, slot, tokens=None, into=into, deadline_s=deadline_s)

    def lookup(self, token_ids: Sequence[int]) -> Found | None:
        """The longest published prefix of `token_ids` that can be restored; None where there is none."""
        return self._engine.lookup(token_ids)

    def close(self) -> None:
        """Unregister and give the pools back. Images stay.

        Raises:
            Busy: a worker may still touch rows; try again.
        """
        self._engine.unregister()
        for pool in self._pools:
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _free_slot(self, slot: int, deadline_s: float) -> None:
        """Wait until no worker can touch a slot's rows and states any more."""
        if not 0 <= slot < self.slots:
            raise UsageError("bad_value", f"there are slots 0..{self.slots - 1}, got {slot}")
        last = self._last.get(slot)
        if last is not None and not last.wait_rows_free(deadline_s):
            raise Busy("rows_busy", f"the rows of slot {slot} are still used by an earlier operation")
        self._last.pop(slot, None)

    def _contents(self, cache: Cache, token_ids: Sequence[int]) -> list[LayerContent]:
        """The cache's tensors, checked."""
        if getattr(token_ids, "ndim", 1) != 1:  # a tensor, as models take and give them: with an axis for the batch
            shape = list(getattr(token_ids, "shape", ()))
            raise UsageError(
                "bad_tokens", f"token ids must have one axis, got the shape {shape}: give those of one row"
            )
        tokens = len(token_ids)
        self._check_tokens(tokens)
        return contents_of(cache, self._forms, tokens)

    def _check_tokens(self, tokens: int) -> None:
        if not 0 < tokens <= self.max_tokens:
            raise UsageError("bad_tokens", f"a slot holds 1 to {self.max_tokens} tokens, got {tokens}")

    def _by_stage(self, contents: Sequence[LayerContent]) -> Iterable[tuple[StagePlanes, Sequence[LayerContent]]]:
        """Each stage with what belongs to its layers."""
        first = 0
        for stage in self._planes:
            yield stage, contents[first : first + len(stage.forms)]
            first += len(stage.forms)

    def _rows(self, slot: int, tokens: int | None) -> list[GroupRows]:
        """By stage, the rows of a slot that `tokens` tokens take (None: all of the slot's, of which an image takes the
        first).
        """
        return [GroupRows(*([run] for run in stage.rows(slot, tokens))) for stage in self._planes]

    def _fetch(
        self,
        fetch: Callable[..., RestoreTicket],
        conversation: str,
        slot: int,
        *,
        tokens: int | None,
        into: Cache | None,
        deadline_s: float,
    ) -> tuple[Cache, int]:
        self._free_slot(slot, deadline_s)
        cache = self._new_cache() if into is None else into
        check_cache(cache, self._forms)
        room = room_of(cache)
        most = self.max_tokens if room is None else min(room, self.max_tokens)
        if tokens is not None:
            self._check_tokens(tokens)
            if tokens > most:
                raise UsageError("bad_rows", f"the cache holds {most} tokens, asked were {tokens}")
        # An image that is longer than the cache is refused for want of rows, before a byte moves.
        rows = self._rows(slot, tokens if tokens is not None else most if most < self.max_tokens else None)
        asked = -1 if tokens is None else tokens
        ticket = fetch(conversation, None, slot, rows_by_stage=rows, tokens=asked, deadline_s=deadline_s)
        self._last[slot] = ticket
        count = ticket.result().tokens
        contents = [layer for stage in self._planes for layer in stage.read(slot, count)]
        fill_cache(cache, self._forms, contents, count)
        return cache, count


def _allocate(layout: StageLayout, device: torch.device, cpu_device: str) -> StagePool:
    """A pool of zeros where the stage's layers lie; `cpu_device` is what the daemon calls a `CpuPool`'s device."""
    if device.type == "cpu":
        return StagePool(cpu_device, layout, CpuPool.allocate(pool_bytes_for(layout)))
    return StagePool(str(device), layout, torch.zeros(pool_bytes_for(layout), dtype=torch.uint8, device=device))


def _device_of(forms: Sequence[LayerForm]) -> torch.device:
    """Where the layers of a stage lie."""
    return next(form.device for form in forms if form.device is not None)


def _bytes_of(stage: StagePool) -> torch.Tensor:
    memory = stage.memory
    return memory.tensor(torch.uint8, (memory.nbytes,)) if isinstance(memory, CpuPool) else memory


def _cpu_pools(stages: Iterable[StagePool]) -> list[CpuPool]:
    return [stage.memory for stage in stages if isinstance(stage.memory, CpuPool)]
