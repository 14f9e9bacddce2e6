"""Parking the conversations of a transformers model whose layers are split over stages.

A `CacheParker` owns one pool a stage. `park` copies a `DynamicCache` into a slot's rows and captures them; `restore`
has the daemon fill a slot's rows and builds a new `DynamicCache` out of them. A cache never shares memory with a pool,
so a conversation may go on while its capture runs, and a slot is busy only as long as its last operation::

    DynamicCache --write--> rows of the slot --capture--> image --restore--> rows of the slot --read--> DynamicCache

First form: every layer must be a plain `DynamicLayer` (full attention, batch of one). Other kinds are refused by name,
because their keys and values are not all there is to restore (a window's position, recurrent state).
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from shm.layout import StageLayout
from stratad.engines.kv_planes import StagePlanes, layout_for, pool_bytes_for
from stratad.engines.model_layers import fingerprint_of, layer_form, observe_layers, plain_layers, split_layers
from stratad.engines.parking import CaptureTicket, Found, ParkingClient, ParkingEngine, RestoreTicket
from stratad.errors import Busy, UsageError
from stratad.pools import CpuPool, StagePool

DEFAULT_DEADLINE_S: Final = 30.0


class CacheParker:
    """Parks and restores the caches of one model. Owns its pools; used by one thread at a time.

    Attributes:
        slots, max_tokens: slots of every pool, and the tokens that one holds.
        stage_devices: the device of every stage, as it was registered.
        token_bytes: K/V bytes of one token over all stages.
    """

    def __init__(
        self,
        engine: ParkingEngine,
        planes: Sequence[StagePlanes],
        stages: Sequence[StagePool],
        *,
        config: PreTrainedConfig,
        slots: int,
        max_tokens: int,
    ) -> None:
        """Use `register`; this takes what that has made."""
        self.slots: Final = slots
        self.max_tokens: Final = max_tokens
        self.stage_devices: Final = tuple(stage.device for stage in stages)
        self.token_bytes: Final = sum(layout_for(stage.forms, 1).groups[0].row_bytes for stage in planes)
        self._engine: Final = engine
        self._planes: Final = tuple(planes)
        self._pools: Final = tuple(_cpu_pools(stages))
        self._config: Final = config
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
    ) -> Self:
        """Allocate the pools and register them.

        Args:
            client: a connected client.
            model: a causal model in its final place and element type; one token is run through it to see its K/V.
            namespace: whose conversations these are.
            revision: what tells these weights from others of the same form (a commit, a hash).
            max_tokens: tokens that a slot can hold.
            stages: number of stages. A model that lies on several devices has one stage a device.
            slots: slots of every pool.
            devices: the daemon's device of each stage, for a model on the CPU (default ``cpu:0``, ``cpu:1``, ...).
            name: what the daemon shows as the engine.

        Raises:
            UsageError: a layer kind, form or split that cannot be parked.
            StratadError: the daemon refused the registration.
        """
        if slots < 1 or max_tokens < 1:
            raise UsageError("bad_value", f"slots and max_tokens must be at least 1, got {slots} and {max_tokens}")
        split = split_layers(observe_layers(model), stages)
        if devices and len(devices) != len(split):
            raise UsageError("bad_value", f"{len(devices)} devices were named for {len(split)} stages")
        made: list[StagePool] = []
        planes: list[StagePlanes] = []
        try:
            for number, forms in enumerate(split):
                layout = layout_for(forms, slots * max_tokens, client.welcome.chunk_tokens)
                made.append(_allocate(layout, forms[0].device, devices[number] if devices else f"cpu:{number}"))
                planes.append(StagePlanes(forms, slots * max_tokens, _bytes_of(made[-1])))
                planes[-1].sign()
            fingerprint = fingerprint_of(model, split[0][0].dtype, revision)
            engine = client.register(engine=name, namespace=namespace, fingerprint=fingerprint, stages=made)
        except BaseException:
            planes.clear()
            for pool in _cpu_pools(made):
                pool.close()
            raise
        return cls(engine, planes, made, config=model.config, slots=slots, max_tokens=max_tokens)

    def park(
        self,
        conversation: str,
        cache: DynamicCache,
        token_ids: Sequence[int],
        *,
        slot: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> CaptureTicket:
        """Copy `cache` into the slot's rows and start to capture them; the ticket's `result` waits for the image.

        `token_ids` are the tokens that the cache holds, one for each position. The cache is only read, and on a CPU
        free when this returns; on a GPU the copies are on its current stream, as the model's own work is.

        Raises:
            UsageError: the cache is not of the registered form, or does not hold as many tokens.
            Busy: an earlier operation still had the slot's rows at the deadline.
            StratadError: the daemon is lost.
        """
        first = self._free_slot(slot, deadline_s)
        tokens = len(token_ids)
        if not 0 < tokens <= self.max_tokens:
            raise UsageError("bad_tokens", f"a slot holds 1 to {self.max_tokens} tokens, got {tokens}")
        layers = self._layers_of(cache, tokens)
        for stage in self._planes:
            stage.write(first, [layers.pop(0) for _ in stage.forms])
        ticket = self._engine.capture(conversation, token_ids, [(first, tokens)], slot, deadline_s=deadline_s)
        self._last[slot] = ticket
        return ticket

    def restore(
        self,
        conversation: str,
        *,
        slot: int = 0,
        tokens: int | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> tuple[DynamicCache, int]:
        """A new cache with the first `tokens` tokens (None: all) of the conversation's image, and how many those are.

        Every byte was verified before it reached the slot. The image stays.

        Raises:
            UsageError: no such conversation or slot.
            Damaged: the image is no longer what was captured: read the prompt again.
            Busy: an earlier operation still had the slot's rows at the deadline.
            StratadError: whatever else the daemon says.
        """
        first, rows = self._rows_for(slot, tokens, deadline_s)
        asked = -1 if tokens is None else tokens
        ticket = self._engine.restore(conversation, rows, slot, tokens=asked, deadline_s=deadline_s)
        return self._restored(ticket, slot, first)

    def take(
        self, conversation: str, *, slot: int = 0, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> tuple[DynamicCache, int]:
        """Like `restore` of all tokens, and the image is given up once its bytes are in the slot."""
        first, rows = self._rows_for(slot, None, deadline_s)
        ticket = self._engine.take(conversation, rows, slot, deadline_s=deadline_s)
        return self._restored(ticket, slot, first)

    def lookup(self, token_ids: Sequence[int]) -> Found | None:
        """The longest published prefix of `token_ids`; None where there is none."""
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

    def _free_slot(self, slot: int, deadline_s: float) -> int:
        """First row of a slot whose rows no worker can touch any more."""
        if not 0 <= slot < self.slots:
            raise UsageError("bad_value", f"there are slots 0..{self.slots - 1}, got {slot}")
        last = self._last.get(slot)
        if last is not None and not last.wait_rows_free(deadline_s):
            raise Busy("rows_busy", f"the rows of slot {slot} are still used by an earlier operation")
        self._last.pop(slot, None)
        return slot * self.max_tokens

    def _rows_for(self, slot: int, tokens: int | None, deadline_s: float) -> tuple[int, list[tuple[int, int]]]:
        """First row, and the rows of a slot that `tokens` tokens take (None: all of the slot's, of which an image takes
        the first).
        """
        first = self._free_slot(slot, deadline_s)
        if tokens is None:
            tokens = self.max_tokens
        if not 0 < tokens <= self.max_tokens:
            raise UsageError("bad_tokens", f"a slot holds 1 to {self.max_tokens} tokens, got {tokens}")
        return first, [(first, tokens)]

    def _layers_of(self, cache: DynamicCache, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer, checked against the registered forms."""
        forms = [form for stage in self._planes for form in stage.forms]
        layers = plain_layers(cache)
        if len(layers) != len(forms):
            raise UsageError("bad_value", f"the cache has {len(layers)} layers, the registered model {len(forms)}")
        checked: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, (layer, form) in enumerate(zip(layers, forms, strict=True)):
            keys, values = layer.keys, layer.values
            if keys is None or values is None:
                raise UsageError("bad_value", f"layer {number} of the cache is empty")
            seen = layer_form(keys, values)
            if seen != form:
                raise UsageError("bad_value", f"layer {number} of the cache is {seen}, registered was {form}")
            if keys.shape[0] != 1:
                raise UsageError("bad_value", f"layer {number} holds a batch of {keys.shape[0]}, expected 1")
            if keys.shape[2] != tokens or values.shape[2] != tokens:
                raise UsageError("bad_tokens", f"layer {number} holds {keys.shape[2]} tokens, got {tokens} token ids")
            checked.append((keys, values))
        return checked

    def _restored(self, ticket: RestoreTicket, slot: int, first: int) -> tuple[DynamicCache, int]:
        self._last[slot] = ticket
        tokens = ticket.result().tokens
        cache = DynamicCache(config=self._config)
        tensors = [layer for stage in self._planes for layer in stage.read(first, tokens)]
        for layer, (keys, values) in zip(plain_layers(cache), tensors, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache, tokens


def _allocate(layout: StageLayout, device: torch.device, cpu_device: str) -> StagePool:
    """A pool of zeros where the stage's layers lie; `cpu_device` is what the daemon calls a `CpuPool`'s device."""
    if device.type == "cpu":
        return StagePool(cpu_device, layout, CpuPool.allocate(pool_bytes_for(layout)))
    return StagePool(str(device), layout, torch.zeros(pool_bytes_for(layout), dtype=torch.uint8, device=device))


def _bytes_of(stage: StagePool) -> torch.Tensor:
    memory = stage.memory
    return memory.tensor(torch.uint8, (memory.nbytes,)) if isinstance(memory, CpuPool) else memory


def _cpu_pools(stages: Iterable[StagePool]) -> list[CpuPool]:
    return [stage.memory for stage in stages if isinstance(stage.memory, CpuPool)]
