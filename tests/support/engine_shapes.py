"""The cache layouts of `stratad.engines.layouts` as their engines index them, each of random sizes."""

from collections.abc import Callable

from shm.layout import Plane, StageLayout, check_layout
from stratad.engines import layouts
from stratad.engines.layouts import PageUse, repeated
from tests.support.engine_arrays import Bytes, Elements, Maker, Read, Shape, Tensor, at, shape_of


def token_major_apart(made: Maker) -> Shape:
    """SGLang, llama.cpp: K and V of each layer in tensors of their own."""
    rows, heads, dim = 2 * made.tokens + 9, made.small(), made.dim()
    tensors = [made.tensor(rows, heads, dim) for _ in range(2 * made.small())]
    planes = [p for t in tensors for p in layouts.token_major(t.offset_bytes, rows=rows, token_bytes=t.bytes_of(1, 2))]
    return shape_of(made, [(planes, 0, [at(t, "row") for t in tensors])])


def token_major_one_tensor(made: Maker) -> Shape:
    """All layers in one tensor, K and V fused in the token: [layers, rows, 2 * heads, dim]."""
    layers, rows, heads, dim = made.small(), 2 * made.tokens + 9, 2 * made.small(), made.dim()
    tensor = made.tensor(layers, rows, heads, dim)
    one = layouts.token_major(tensor.offset_bytes, rows=rows, token_bytes=tensor.bytes_of(2, 3))
    planes = repeated(one, range(0, tensor.nbytes, tensor.bytes_of(1, 2, 3)))
    return shape_of(made, [(planes, 0, [at(tensor, layer, "row") for layer in range(layers)])])


def head_major(made: Maker) -> Shape:
    """A static cache's slot: [heads, rows, dim] for K and for V of each layer."""
    rows, heads, dim = 2 * made.tokens + 9, made.small(), made.dim()
    tensors = [made.tensor(heads, rows, dim) for _ in range(2 * made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.head_major(t.offset_bytes, heads=heads, rows=rows, head_bytes=t.bytes_of(2))
    ]
    return shape_of(made, [(planes, 0, [at(t, head, "row") for t in tensors for head in range(heads)])])


def token_pages(made: Maker) -> Shape:
    """SGLang with pages: [pages * page, heads, dim], where a row is a page."""
    page, heads, dim = made.block(), made.small(), made.dim()
    pages = made.blocks(page)
    tensors = [made.tensor(pages * page, heads, dim) for _ in range(2 * made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.paged(t.offset_bytes, blocks=pages, block=page, token_bytes=t.bytes_of(1, 2))
    ]

    def of(tensor: Tensor) -> Read:
        return lambda pool, row, token: tensor(pool)[row * page + token : row * page + token + 1]

    return shape_of(made, [(planes, 0, [of(t) for t in tensors])])


def paged_kv_first(made: Maker) -> Shape:
    """vLLM FlashAttention of 2025: [2, blocks, block, heads, dim] a layer."""
    block, heads, dim = made.block(), made.small(), made.dim()
    blocks = made.blocks(block)
    tensors = [made.tensor(2, blocks, block, heads, dim) for _ in range(made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.paged_kv_first(t.offset_bytes, blocks=blocks, block=block, token_bytes=t.bytes_of(3, 4))
    ]
    return shape_of(made, [(planes, 0, [at(t, kv, "row", "token") for t in tensors for kv in range(2)])])


def _block_first(made: Maker, block: int) -> tuple[list[Plane], list[Read]]:
    heads, dim, blocks = made.small(), made.dim(), made.blocks(block)
    tensors = [made.tensor(blocks, 2, block, heads, dim) for _ in range(made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.paged_block_first(t.offset_bytes, blocks=blocks, block=block, token_bytes=t.bytes_of(3, 4))
    ]
    return planes, [at(t, "row", kv, "token") for t in tensors for kv in range(2)]


def paged_block_first(made: Maker) -> Shape:
    """FlashInfer NHD: [blocks, 2, block, heads, dim] a layer."""
    planes, reads = _block_first(made, made.block())
    return shape_of(made, [(planes, 0, reads)])


def paged_heads_kv_first(made: Maker) -> Shape:
    """vLLM FlashAttention in HND order: [2, blocks, heads, block, dim]."""
    block, heads, dim = made.block(), made.small(), made.dim()
    blocks = made.blocks(block)
    t = made.tensor(2, blocks, heads, block, dim)
    planes = layouts.paged_heads_kv_first(
        t.offset_bytes, blocks=blocks, heads=heads, block=block, head_bytes=t.bytes_of(4)
    )
    return shape_of(made, [(planes, 0, [at(t, kv, "row", head, "token") for kv in range(2) for head in range(heads)])])


def paged_heads_block_first(made: Maker) -> Shape:
    """FlashInfer HND: [blocks, 2, heads, block, dim]."""
    block, heads, dim = made.block(), made.small(), made.dim()
    blocks = made.blocks(block)
    t = made.tensor(blocks, 2, heads, block, dim)
    planes = layouts.paged_heads_block_first(
        t.offset_bytes, blocks=blocks, heads=heads, block=block, head_bytes=t.bytes_of(4)
    )
    return shape_of(made, [(planes, 0, [at(t, "row", kv, head, "token") for kv in range(2) for head in range(heads)])])


def packed_tokens(made: Maker) -> Shape:
    """vLLM, K and V packed, NHD order: in memory [blocks, block, heads, 2 * dim]."""
    block, heads, dim = made.block(), made.small(), 2 * made.dim()
    blocks = made.blocks(block)
    tensors = [made.tensor(blocks, block, heads, dim) for _ in range(made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.paged(t.offset_bytes, blocks=blocks, block=block, token_bytes=t.bytes_of(2, 3))
    ]
    return shape_of(made, [(planes, 0, [at(t, "row", "token") for t in tensors])])


def packed_heads(made: Maker) -> Shape:
    """vLLM on CPUs, K and V packed, HND order: [blocks, heads, 128, 2 * dim]."""
    block, heads, dim = 128, made.small(), 2 * made.dim()
    blocks = made.blocks(block)
    tensors = [made.tensor(blocks, heads, block, dim, dtype="<u2") for _ in range(made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.paged_heads(
            t.offset_bytes, blocks=blocks, heads=heads, block=block, head_bytes=t.bytes_of(3)
        )
    ]
    return shape_of(made, [(planes, 0, [at(t, "row", head, "token") for t in tensors for head in range(heads)])])


def layered_blocks(made: Maker) -> Shape:
    """TensorRT-LLM: [blocks, layers, 2, heads, block, dim]."""
    layers, block, heads, dim, kv = made.small(), made.block(), made.small(), made.dim(), made.random.choice([1, 2])
    blocks = made.blocks(block)
    t = made.tensor(blocks, layers, kv, heads, block, dim)
    planes = layouts.layered_blocks(
        t.offset_bytes, blocks=blocks, layers=layers, heads=heads, block=block, head_bytes=t.bytes_of(5), kv=kv
    )
    parts = [(layer, half, head) for layer in range(layers) for half in range(kv) for head in range(heads)]
    return shape_of(made, [(planes, 0, [at(t, "row", *part, "token") for part in parts])])


def mla(made: Maker) -> Shape:
    """MLA: [blocks, block, 576] of 2 bytes, or 656 bytes."""
    block = made.random.choice([16, 64])
    blocks = made.blocks(block)
    t = made.random.choice([("<u2", 576), ("u1", 656)])
    tensors = [made.tensor(blocks, block, t[1], dtype=t[0]) for _ in range(made.small())]
    planes = [
        plane
        for t in tensors
        for plane in layouts.paged(t.offset_bytes, blocks=blocks, block=block, token_bytes=t.bytes_of(2))
    ]
    return shape_of(made, [(planes, 0, [at(t, "row", "token") for t in tensors])])


def int4_with_scales(made: Maker) -> Shape:
    """4-bit values, two in a byte, and a 2-byte scale for each token and head, in tensors of their own."""
    block, heads, dim = made.block(), made.small(), made.dim()
    blocks = made.blocks(block)
    values = [made.tensor(blocks, block, heads, dim, dtype="u1") for _ in range(2)]
    scales = [made.tensor(blocks, block, heads, dtype="<u2") for _ in range(2)]
    planes = [
        *(
            p
            for t in values
            for p in layouts.paged(t.offset_bytes, blocks=blocks, block=block, token_bytes=heads * dim)
        ),
        *(p for t in scales for p in layouts.paged(t.offset_bytes, blocks=blocks, block=block, token_bytes=heads * 2)),
    ]
    return shape_of(made, [(planes, 0, [at(t, "row", "token") for t in (*values, *scales)])])


def int8_with_block_scales(made: Maker) -> Shape:
    """8-bit values and a 4-byte scale for each block and head: images end with full blocks."""
    block, heads, dim = 16, made.small(), made.dim()
    blocks = made.blocks(block)
    values = made.tensor(blocks, block, heads, dim, dtype="u1")
    scales = made.tensor(blocks, heads)
    planes = [
        *layouts.paged(values.offset_bytes, blocks=blocks, block=block, token_bytes=heads * dim),
        *layouts.whole_blocks(scales.offset_bytes, blocks=blocks, block=block, block_bytes=heads * 4),
    ]
    return shape_of(made, [(planes, 0, [at(values, "row", "token"), at(scales, "row")])])


def scattered_tokens(made: Maker) -> Shape:
    """vLLM's paged attention kernels: K [blocks, heads, dim / x, block, x], V [blocks, heads, dim, block]."""
    block, heads, dim = 16, made.small(), made.dim()
    blocks = made.blocks(block)
    k, v = (
        made.tensor(blocks, heads, dim, block, 8, dtype="<u2"),
        made.tensor(blocks, heads, 8 * dim, block, dtype="<u2"),
    )
    size = k.nbytes // blocks
    planes = [
        p for t in (k, v) for p in layouts.whole_blocks(t.offset_bytes, blocks=blocks, block=block, block_bytes=size)
    ]
    return shape_of(made, [(planes, 0, [at(k, "row"), at(v, "row")])])


def values_then_scales(made: Maker) -> Shape:
    """DeepSeek's indexer: in each block 128 bytes a token, then 4 bytes a token."""
    block = made.random.choice([16, 64])
    blocks = made.blocks(block)
    t = made.tensor(blocks, block * 132, dtype="u1")
    planes = layouts.values_then_scales(t.offset_bytes, blocks=blocks, block=block, value_bytes=128, scale_bytes=4)

    def value(pool: Bytes, row: int, token: int) -> Elements:
        values: Elements = t(pool)[row]
        return values[token * 128 : token * 128 + 128]

    def scale(pool: Bytes, row: int, token: int) -> Elements:
        scales: Elements = t(pool)[row, block * 128 :].reshape(block, 4)
        return scales[token : token + 1]

    return shape_of(made, [(planes, 0, [value, scale])])


def sliding_window(made: Maker) -> Shape:
    """Full attention, and layers with a window, blocks of another size and block ids of their own."""
    full, window = _block_first(made, 16), _block_first(made, made.random.choice([4, 32]))
    return shape_of(made, [(full[0], 0, full[1]), (window[0], made.random.choice([7, 64, 100]), window[1])])


def hybrid_states(made: Maker) -> Shape:
    """SGLang's hybrids: attention in token pools, convolution and recurrent states in slots of layers of their own."""
    planes, reads = _block_first(made, made.block())
    layers, slots = made.small(), 9
    conv = made.tensor(layers, slots, made.dim(), 3, dtype="<u2")
    ssm = made.tensor(layers, slots, made.small(), made.dim(), made.dim())
    states = [
        plane
        for t in (conv, ssm)
        for plane in layouts.slot_states(
            t.offset_bytes, layers=layers, slots=slots, state_bytes=t.nbytes // layers // slots
        )
    ]
    return shape_of(
        made,
        [(planes, 0, reads)],
        [(states, [at(t, layer, "row") for t in (conv, ssm) for layer in range(layers)])],
    )


def shared_pages(made: Maker) -> Shape:
    """vLLM's hybrids: full attention, windows and Mamba states in the pages of the same tensors."""
    heads, dim, block = made.small(), made.dim(), made.block()
    half = block * heads * dim * 4
    conv, ssm = made.small() * 4, 2 * half - 4 * made.small()
    ssm = max(ssm - conv, 4)
    page = max(2 * half, conv + ssm)
    window = made.random.choice([0, 40])
    uses = [PageUse((half, half), block), PageUse((conv, ssm), 0), PageUse((half, half), block, window)]
    blocks = 2 * made.blocks(block) + 8
    tensors = [made.tensor(blocks, page // 4) for _ in range(made.small())]
    layout = layouts.shared_pages([t.offset_bytes for t in tensors], uses, blocks=blocks, page_bytes=page)
    check_layout(layout, made.at)

    def kv(tensor: Tensor, part: int) -> Read:
        def read(pool: Bytes, row: int, token: int) -> Elements:
            one = tensor(pool)[row, part * half // 4 : (part + 1) * half // 4]
            view: Elements = one.reshape(block, heads, dim)[token]
            return view

        return read

    def state(tensor: Tensor, start: int, size: int) -> Read:
        def read(pool: Bytes, row: int, _: int) -> Elements:
            view: Elements = tensor(pool)[row]
            return view[start // 4 : (start + size) // 4]

        return read

    attention = tuple(kv(t, part) for t in tensors for part in range(2))
    states = tuple(state(t, *part) for t in tensors for part in ((0, conv), (conv, ssm)))
    return Shape(layout, made.at, (attention, attention, states))


def draft_model(made: Maker) -> Shape:
    """A draft model's layers: some with the rows of the main model, some with rows of their own."""
    main = _block_first(made, 16)
    own = _block_first(made, made.random.choice([16, 32]))
    return shape_of(made, [(main[0], 0, main[1]), (own[0], 0, own[1])])


SHAPES: dict[str, Callable[[Maker], Shape]] = {
    made.__name__: made
    for made in (
        token_major_apart,
        token_major_one_tensor,
        head_major,
        token_pages,
        paged_kv_first,
        paged_block_first,
        paged_heads_kv_first,
        paged_heads_block_first,
        packed_tokens,
        packed_heads,
        layered_blocks,
        mla,
        int4_with_scales,
        int8_with_block_scales,
        scattered_tokens,
        values_then_scales,
        sliding_window,
        hybrid_states,
        shared_pages,
        draft_model,
    )
}
"""Every named layout."""


def make_shape(name: str, seed: int, tokens: int, chunk_tokens: int = 256) -> Shape:
    """A layout of random sizes with room for two conversations of `tokens` tokens."""
    made = SHAPES[name](Maker(seed, tokens))
    return Shape(StageLayout(made.layout.groups, made.layout.states, chunk_tokens), made.pool_bytes, made.reads)
