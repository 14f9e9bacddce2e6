"""An exchange of a client over the scripted core: puts and gets as requests."""

from collections.abc import Sequence

from ipc.messages import (
    EXCHANGE_ROW_BYTES,
    GetBegin,
    GetEnd,
    GetPart,
    MemfdPool,
    Parts,
    PutAbort,
    PutBegin,
    PutBegun,
    PutCommit,
    PutPart,
    Register,
    Registered,
    Reply,
    Stage,
)
from shm.layout import Plane, StageLayout
from shm.rows import pack_rows
from tests.support.core_harness import FINGERPRINT, Harness, pack_tokens
from tests.support.layouts import stage_layout

EXCHANGE_ROWS = 2048
# Rows of a chunk: what pieces must be multiples of.
STEP = 256


def exchange_layout(rows: int = EXCHANGE_ROWS) -> StageLayout:
    """What an exchange of so many rows registers."""
    return stage_layout((Plane(0, EXCHANGE_ROW_BYTES, EXCHANGE_ROW_BYTES, rows),), None, STEP)


class CoreExchange:
    """A registered exchange; each method sends one request and returns its number, or what the answer holds."""

    def __init__(self, core: Harness, engine_id: int, client: int) -> None:
        self.core = core
        self.engine_id = engine_id
        self.client = client

    @classmethod
    def register(
        cls, core: Harness, client: int = 1, *, worker: str = "cpu:0", namespace: str = "ns", rows: int = EXCHANGE_ROWS
    ) -> "CoreExchange":
        """Register it."""
        layout = exchange_layout(rows)
        stage = Stage(0, core.core.state.workers[worker].device, MemfdPool(99, layout.end_bytes), layout)
        request = Register(core.next_seq(), namespace, "exchange", FINGERPRINT, (stage,), exchange=True)
        core.ask(client, request)
        reply = core.final(client, request.seq)
        assert isinstance(reply, Registered), reply
        return cls(core, reply.engine_id, client)

    def begin(self, conversation: str = "a", tokens: Sequence[int] = ()) -> int:
        """Begin a put; its number."""
        request = PutBegin(self.core.next_seq(), self.engine_id, conversation, pack_tokens(tokens))
        self.core.ask(self.client, request)
        reply = self.core.final(self.client, request.seq)
        assert isinstance(reply, PutBegun), reply
        return reply.put_id

    def put(
        self,
        put_id: int,
        name: str,
        nbytes: int,
        *,
        at: int = 0,
        first_row: int = 0,
        rows: int | None = None,
        meta: str = "",
        deadline_s: float = 30.0,
    ) -> int:
        """Put a part (or rows of it) out of the exchange's rows from `at` on; the request's number."""
        count = -(-nbytes // EXCHANGE_ROW_BYTES) - first_row if rows is None else rows
        packed = pack_rows([(at, count)]) if count else b""
        request = PutPart(
            self.core.next_seq(), self.engine_id, put_id, name, nbytes, packed, meta, first_row, deadline_s
        )
        self.core.ask(self.client, request)
        return request.seq

    def commit(self, put_id: int) -> Reply:
        """Commit; the answer."""
        request = PutCommit(self.core.next_seq(), self.engine_id, put_id)
        self.core.ask(self.client, request)
        return self.core.final(self.client, request.seq)

    def abort(self, put_id: int) -> Reply:
        """Abort; the answer."""
        request = PutAbort(self.core.next_seq(), self.engine_id, put_id)
        self.core.ask(self.client, request)
        return self.core.final(self.client, request.seq)

    def open(self, conversation: str = "a", image_id: int = 0) -> Parts:
        """Begin a get that must succeed."""
        reply = self.try_open(conversation, image_id)
        assert isinstance(reply, Parts), reply
        return reply

    def try_open(self, conversation: str = "a", image_id: int = 0) -> Reply:
        """Begin a get; the answer."""
        request = GetBegin(self.core.next_seq(), self.engine_id, conversation, image_id)
        self.core.ask(self.client, request)
        return self.core.final(self.client, request.seq)

    def get(self, get_id: int, part: int, nbytes: int, *, at: int = 0, first_row: int = 0, rows: int = -1) -> int:
        """Get a part (or rows of it) into the exchange's rows from `at` on; the request's number."""
        count = -(-nbytes // EXCHANGE_ROW_BYTES) - first_row if rows < 0 else rows
        packed = pack_rows([(at, count)]) if count else b""
        request = GetPart(self.core.next_seq(), self.engine_id, get_id, part, packed, first_row)
        self.core.ask(self.client, request)
        return request.seq

    def close(self, get_id: int) -> Reply:
        """End a get; the answer."""
        request = GetEnd(self.core.next_seq(), self.engine_id, get_id)
        self.core.ask(self.client, request)
        return self.core.final(self.client, request.seq)

    def put_whole(self, conversation: str, parts: dict[str, int], tokens: Sequence[int] = ()) -> Reply:
        """A whole put, all jobs done well; the commit's answer."""
        put_id = self.begin(conversation, tokens)
        for name, nbytes in parts.items():
            self.put(put_id, name, nbytes)
            self.core.finish_all()
        return self.commit(put_id)
