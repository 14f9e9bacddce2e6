"""Planes for the cache tensors of today's engines: one small function a layout.

Every function takes byte sizes and the offset of *one* tensor in its pool and gives the planes of that tensor.
`repeated` makes those of all layers out of those of one. Planes that one list of rows addresses then become a group::

    planes = repeated(paged_kv_first(0, blocks=b, block=16, token_bytes=2048), layer_offsets)
    layout = StageLayout(groups=(RowGroup(planes),))

Words: a *token* is what one token has in one tensor for K or for V, all heads together (`token_bytes`), `head_bytes` is
one head's share of it; a *block* holds `block` tokens. In the drawings the last axis is contiguous and sizes are bytes.
Names of engines say where a layout was seen; their sources change, so compare with the tensor's shape *and* strides.

What needs no function of its own:

* Sliding windows: ``RowGroup(planes, window_tokens=...)``, with a block size and blocks of its own.
* Layers of a draft model: further planes of the same group where the engine gives them the same rows, else a group of
  their own.
* Quantized caches: packed elements (8 or 4 bit) are only smaller tokens; scales that lie in tensors of their own are
  planes of their own, a few bytes wide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shm.layout import Plane, RowGroup, StageLayout, StateGroup


def repeated(planes: Iterable[Plane], offsets: Iterable[int]) -> tuple[Plane, ...]:
    """The planes of one tensor moved by each of some offsets: those of every layer, whether the layers lie in one big
    tensor or in many tensors of one pool.
    """
    one = tuple(planes)
    return tuple(
        msgspec.structs.replace(plane, offset_bytes=plane.offset_bytes + offset) for offset in offsets for plane in one
    )


# --- slot caches: a row is a token ----------------------------------------------------------------------------------


def token_major(offset_bytes: int, *, rows: int, token_bytes: int) -> tuple[Plane, ...]:
    """Tokens one after the other; one plane for K, one for V, or one for both where a token's K and V lie together::

        [rows, heads, dim]       | token 0: head 0, head 1, ... | token 1 | ...

    SGLang's `MHATokenToKVPool` with page size 1 (``[size + page_size, head_num, head_dim]`` for K and for V of each
    layer) and `MLATokenToKVPool` (``[size + page_size, 1, kv_lora_rank + qk_rope_head_dim]``), both in
    sglang/srt/mem_cache/memory_pool.py; llama.cpp's ``cache_k_l*`` and, where V is not transposed (flash attention),
    ``cache_v_l*`` (src/llama-kv-cache.cpp, ``[n_embd_gqa, kv_size, n_stream]`` in ggml's order), also quantized: a
    token is then ``ggml_row_size`` bytes.
    """
    return (Plane(offset_bytes, token_bytes, token_bytes, rows),)


def head_major(offset_bytes: int, *, heads: int, rows: int, head_bytes: int) -> tuple[Plane, ...]:
    """A head's tokens together: a plane for every head, since a token's heads lie far apart::

        [heads, rows, dim]       | head 0: token 0, token 1, ... | head 1: token 0, ... |

    The K or V of one slot of a static cache, as transformers' `StaticLayer` allocates it
    (``[batch, heads, max_cache_len, dim]``, src/transformers/cache_utils.py). There every slot is such an array of its
    own; one group cannot hold them all, so a slot is a pool, and an engine, of its own.
    """
    return tuple(Plane(offset_bytes + head * rows * head_bytes, head_bytes, head_bytes, rows) for head in range(heads))


# --- paged caches: a row is a block ---------------------------------------------------------------------------------


def paged(offset_bytes: int, *, blocks: int, block: int, token_bytes: int, stride_bytes: int = 0) -> tuple[Plane, ...]:
    """Blocks of whole tokens, one plane::

        [blocks, block, ...]     | block 0: token 0, token 1, ... | block 1 | ...     stride_bytes apart (0: dense)

    MLA caches (vLLM: ``[num_blocks, block_size, head_size]``, 576 elements wide, or 656 bytes with ``fp8_ds_mla``,
    vllm/v1/attention/backends/mla/); SGLang's token pools with a page size above 1 (block: the page); vLLM's K and V
    packed a token at a time (``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` in NHD order, so in memory
    ``[num_blocks, block_size, num_kv_heads, 2 * head_size]``; vllm/v1/attention/backends/flash_attn.py, triton_attn.py;
    with ``*_per_token_head`` caches the scales lie inside of the token too); scales in tensors of their own.
    """
    row_bytes = block * token_bytes
    return (Plane(offset_bytes, row_bytes, stride_bytes or row_bytes, blocks, block, token_bytes),)


def paged_kv_first(offset_bytes: int, *, blocks: int, block: int, token_bytes: int) -> tuple[Plane, ...]:
    """All K, then all V: two planes::

        [2, blocks, block, heads, dim]      | K: block 0, block 1, ... | V: block 0, block 1, ... |

    vLLM's FlashAttention backend of 2025 in NHD order (vllm/v1/attention/backends/flash_attn.py)
    and its ROCm attention; TensorRT Edge-LLM's page pool (``[2, numPages, tokensPerPage, numKVHeads, headDim]``).
    """
    half = blocks * block * token_bytes
    return repeated(paged(offset_bytes, blocks=blocks, block=block, token_bytes=token_bytes), (0, half))


def paged_block_first(offset_bytes: int, *, blocks: int, block: int, token_bytes: int) -> tuple[Plane, ...]:
    """K and V of a block together: two planes that interleave with one stride::

        [blocks, 2, block, heads, dim]      | block 0: K, V | block 1: K, V | ...

    FlashInfer in NHD order (``[max_num_pages, 2, page_size, num_kv_heads, head_dim]``, flashinfer/prefill.py), so
    vLLM's FlashInfer backend and TensorRT-LLM's `get_buffers(kv_layout="NHD")`; vLLM's Triton backend until 0.24, and
    its FlashAttention caches in models with Mamba layers, whose strides are changed to this order.
    """
    row_bytes = block * token_bytes
    one = paged(offset_bytes, blocks=blocks, block=block, token_bytes=token_bytes, stride_bytes=2 * row_bytes)
    return repeated(one, (0, row_bytes))


def paged_heads(
    offset_bytes: int, *, blocks: int, heads: int, block: int, head_bytes: int, stride_bytes: int = 0
) -> tuple[Plane, ...]:
    """Inside a block a head's tokens together: a plane for every head::

        [blocks, heads, block, dim]         | block 0: head 0: token 0, token 1, ... | head 1: ... | block 1 | ...

    FlashInfer's separate K or V in HND order (``[max_num_pages, num_kv_heads, page_size, head_dim]``); vLLM on CPUs
    and its HND caches since K and V are packed (``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, block 128
    on CPUs: `head_bytes` is both; vllm/v1/attention/backends/cpu_attn.py).
    """
    part = block * head_bytes
    stride = stride_bytes or heads * part
    return tuple(Plane(offset_bytes + head * part, part, stride, blocks, block, head_bytes) for head in range(heads))


def paged_heads_kv_first(
    offset_bytes: int, *, blocks: int, heads: int, block: int, head_bytes: int
) -> tuple[Plane, ...]:
    """All K, then all V, each in HND order: two planes for every head::

        [2, blocks, heads, block, dim]      | K: block 0: head 0: token 0, ... | head 1: ... | ... | V: ... |

    vLLM's FlashAttention backend of 2025 with ``VLLM_KV_CACHE_LAYOUT=HND`` and its CPU backend of that time.
    """
    one = paged_heads(offset_bytes, blocks=blocks, heads=heads, block=block, head_bytes=head_bytes)
    return repeated(one, (0, blocks * heads * block * head_bytes))


def paged_heads_block_first(
    offset_bytes: int, *, blocks: int, heads: int, block: int, head_bytes: int
) -> tuple[Plane, ...]:
    """K and V of a block together, each in HND order: two planes for every head, all with one stride::

        [blocks, 2, heads, block, dim]      | block 0: K: head 0: token 0, ... | head 1: ... | V: ... | block 1 | ...

    FlashInfer in HND order (``[max_num_pages, 2, num_kv_heads, page_size, head_dim]``), so vLLM's FlashInfer backend on
    GPUs that want HND.
    """
    return layered_blocks(offset_bytes, blocks=blocks, layers=1, heads=heads, block=block, head_bytes=head_bytes)


def layered_blocks(
    offset_bytes: int, *, blocks: int, layers: int, heads: int, block: int, head_bytes: int, kv: int = 2
) -> tuple[Plane, ...]:
    """Every layer of a block together: `kv` (2, with K alone 1) planes for every head of every layer, all with one
    stride::

        [blocks, layers, kv, heads, block, dim]     | block 0: layer 0: K: head 0: token 0, ... | ... | block 1 | ...

    TensorRT-LLM's pools (``(numBlocks, numLayers, kvFactor, blockSize)`` with ``blockSize`` all heads of a block,
    tensorrt_llm/_torch/pyexecutor/resource_manager.py, read there with ``kv_layout="HND"``). Where a kernel orders a
    block in another way, or where these are more planes than a stage may have, `whole_blocks` is right for it.
    """
    tensor = heads * block * head_bytes
    stride = layers * kv * tensor
    one = paged_heads(offset_bytes, blocks=blocks, heads=heads, block=block, head_bytes=head_bytes, stride_bytes=stride)
    return repeated(one, range(0, stride, tensor))


def whole_blocks(
    offset_bytes: int, *, blocks: int, block: int, block_bytes: int, stride_bytes: int = 0
) -> tuple[Plane, ...]:
    """Blocks in which a token's bytes do not lie together, or are not known: one plane that cannot locate tokens, so
    that images of the stage end with a full block::

        [blocks, heads, dim / x, block, x]          | block 0: anything | block 1 | ...

    The K cache of vLLM's paged attention kernels (``[num_blocks, num_kv_heads, head_size / x, block_size, x]``) and
    their V cache (``[num_blocks, num_kv_heads, head_size, block_size]``); scales of one a block.
    """
    return (Plane(offset_bytes, block_bytes, stride_bytes or block_bytes, blocks, block, 0),)


def values_then_scales(
    offset_bytes: int, *, blocks: int, block: int, value_bytes: int, scale_bytes: int
) -> tuple[Plane, ...]:
    """In each block all values, then all scales: two planes that interleave with one stride::

        [blocks, block * (dim + 4)]                 | block 0: value 0, value 1, ... | scale 0, scale 1, ... | block 1 |

    The 8-bit key cache of DeepSeek's sparse attention indexer (DeepGEMM, `kv_cache_cast_to_fp8` of its tests:
    128 bytes of values and a float32 scale a token) as vLLM and SGLang keep it.
    """
    values = block * value_bytes
    stride = values + block * scale_bytes
    return (
        *paged(offset_bytes, blocks=blocks, block=block, token_bytes=value_bytes, stride_bytes=stride),
        *paged(offset_bytes + values, blocks=blocks, block=block, token_bytes=scale_bytes, stride_bytes=stride),
    )


# --- recurrent states, and blocks that several kinds of layers share --------------------------------------------------


def slot_states(offset_bytes: int, *, layers: int, slots: int, state_bytes: int) -> tuple[Plane, ...]:
    """A state for every slot of every layer: a plane a layer::

        [layers, slots, ...]                | layer 0: slot 0, slot 1, ... | layer 1: slot 0, ... |

    SGLang's `MambaPool` (``conv`` and ``temporal``, each ``[num_mamba_layers, size + 1, ...]``).
    """
    plane = Plane(offset_bytes, state_bytes, state_bytes, slots)
    return repeated((plane,), range(0, layers * slots * state_bytes, slots * state_bytes))


@dataclass(frozen=True)
class PageUse:
    """What one kind of layers keeps in the pages of shared tensors: `parts` are the sizes of what lies in a page, from
    its first byte on: K and V of attention (`block` tokens each), or the states of a recurrent layer (`block` 0).
    """

    parts: tuple[int, ...]
    block: int
    window_tokens: int = 0


def shared_pages(
    offsets: Sequence[int], uses: Sequence[PageUse], *, blocks: int, page_bytes: int, chunk_tokens: int = 256
) -> StageLayout:
    """Tensors whose pages belong now to one kind of layers, now to another: a group for each kind, all of one space::

        one tensor           | page 0           | page 1                | page 2                    |
        full attention       |                  | K of a block, V of it |                           |
        sliding window       | K, V             |                       |                           |
        linear attention     |                  |                       | convolution, state, (pad) |

    A block id is given to one kind at a time and is the same page in each tensor. vLLM's hybrid models: layer n of
    every kind shares tensor n (`KVCacheTensor.shared_by`, vllm/v1/kv_cache_interface.py); attention keeps
    ``[blocks, 2, block, heads, dim]``, Mamba layers ``[blocks, page]`` with convolution state first
    (vllm/v1/worker/gpu/attn_utils.py). The kinds that keep tokens come first in the layout, in their order here, then
    the states; a state's slot is its page.
    """
    groups, states = list[RowGroup](), list[StateGroup]()
    for use in uses:
        planes: list[Plane] = []
        at = 0
        for size in use.parts:
            planes.append(Plane(at, size, page_bytes, blocks, max(use.block, 1), size // use.block if use.block else 0))
            at += size
        every = repeated(planes, offsets)
        if use.block:
            groups.append(RowGroup(every, use.window_tokens))
        else:
            states.append(StateGroup(every))
    return StageLayout(tuple(groups), tuple(states), chunk_tokens)
