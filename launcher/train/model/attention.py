"""The attention "varlen": each document of a flattened row by itself, with torch's own kernels.

Registered beside transformers' own under a name of its own, with a mask of its own: where transformers knows
no mask for a name, it hands none on, and padding on the left would silently be attended to.

A flattened row comes with the bounds of its documents (`cu_seq_lens_q`, from the collator). On a GPU one call
of torch's variable-length kernel takes them all; everywhere else each document is a causal call of its own,
which needs no mask over all pairs of the row. Whatever is not a flattened row is what "sdpa" makes of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from launcher.machine.hardware import AMPERE
from launcher.train.data.host_counts import document_lengths
from launcher.train.upstream.model_seams import is_surely_causal
from launcher.train.upstream.torch_seams import never_compiled

NAME = "varlen"
KERNEL_WIDTHS = 256
"""The widest head that torch's variable-length kernel takes; widths are multiples of 8."""
WINDOWED = torch.int64
"""dtype of the documents' numbers where the layer has a window; int32 where it has none."""


_kernel: tuple[Callable[..., Any], frozenset[str]] | None = None
"""torch's variable-length kernel and the names of its arguments, which differ between releases; None: this
device or this torch has none. A name of the module, which a compiled layer reads without a break."""


def register_varlen() -> None:
    """Make `attn_implementation="varlen"` known to transformers; again changes nothing."""
    global _kernel
    _kernel = _find_kernel()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """What `attend` needs to know of the rows; transformers calls it once a step for each kind of layer.

    None: nothing but causality. [1, tokens]: the document of each token of one row. Else sdpa's own mask
    [batch, 1, queries, keys] of booleans.
    """
    plain = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    if plain and not use_vmap and attention_mask is None and batch_size == 1:
        documents = _documents(mask_function, q_length, others["device"])
        if documents is not None:
            return documents if local_size is None else documents.to(WINDOWED)
    if plain and allow_is_causal_skip and attention_mask is not None and _right_padded(attention_mask):
        # No token in front of the padding sees it, and what comes of the padding itself nobody reads.
        attention_mask = None
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, **others,
    )  # fmt: skip
    return mask


def _right_padded(attention_mask: torch.Tensor) -> bool:
    """Whether no token [batch, tokens] is after padding."""
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


def _documents(mask_function: Any, length: int, device: Any) -> torch.Tensor | None:
    """Number of the document of each token, int32 [1, length]; None where tokens see later tokens.

    A token sees the one before it unless a document begins with it.
    """
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    place = torch.arange(length, device=device)
    before, behind = (place - 1).clamp(min=0), (place + 1).clamp(max=length - 1)
    if not is_surely_causal(mask_function):  # then its values tell, for which the host waits
        ahead = mask_function(zero, zero, place[:-1], behind[:-1])
        if bool(torch.as_tensor(ahead).any()):
            return None
    starts = ~mask_function(zero, zero, place, before).expand(length)
    return starts.cumsum(0, dtype=torch.int32)[None]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' modules call it: [batch, tokens, heads, width], and no weights.

    query [batch, heads, tokens, width]; key and value with their own, fewer heads. attention_mask: of
    `make_mask`. cu_seq_lens_q, int32 [1 + documents]: where the documents of one flattened row begin and
    where the last one ends; max_length_q: tokens of the longest. ValueError for what it would get wrong.
    """
    _refuse_scores(others)
    masked = attention_mask is not None and attention_mask.ndim > 2
    if masked and cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
        raise ValueError("a flattened row came with a mask of its own, under which documents see each other")
    if masked or (attention_mask is None and cu_seq_lens_q is None):
        mixed: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **others,
        )  # fmt: skip
        return mixed
    _check_row(query, key, attention_mask, sliding_window, others)
    if cu_seq_lens_q is not None and _has_kernel(query, value, dropout, sliding_window):
        longest = max_length_q or max(document_lengths(cu_seq_lens_q))
        return _in_one_call(query, key, value, cu_seq_lens_q, longest, sliding_window, scaling), None
    states = query, key, value
    return _uncompiled(states, cu_seq_lens_q, attention_mask, sliding_window, scaling, dropout), None


def _refuse_scores(others: dict[str, Any]) -> None:
    """ValueError for logits that are changed before the softmax."""
    changed = next((name for name in ("softcap", "s_aux") if others.get(name) is not None), None)
    if changed is not None:
        raise ValueError(
            f"attention {NAME!r} does not know `{changed}`; use model.attn_implementation: eager"
        )


def _check_row(
    query: torch.Tensor,
    key: torch.Tensor,
    numbers: torch.Tensor | None,
    window: int | None,
    others: dict[str, Any],
) -> None:
    """ValueError unless these are the documents of one row, each of which sees nothing but itself."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        found = f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys"
        raise ValueError(f"documents must be in one row without a cache or a prefix, and these are {found}")
    if numbers is not None and numbers.dtype == WINDOWED and window is None:
        raise ValueError(f"this model does not pass its window to attention {NAME!r}; use sdpa")
    biased = next((name for name in ("position_bias", "cache") if others.get(name) is not None), None)
    if biased is not None:
        raise ValueError(f"attention {NAME!r} does not know `{biased}` in a flattened row; use sdpa")


@never_compiled
def _uncompiled(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bounds: torch.Tensor | None,
    numbers: torch.Tensor | None,
    *given: Any,
) -> torch.Tensor:
    """The documents' lengths differ at each step, and a compiled layer would be compiled anew for them."""
    return one_by_one(*states, _counted(numbers) if bounds is None else document_lengths(bounds), *given)


def _counted(numbers: torch.Tensor | None) -> list[int]:
    """The same, of the documents' numbers [1, tokens]."""
    assert numbers is not None, "what has neither bounds nor numbers went to sdpa"
    known: list[int] | None = getattr(numbers, "document_lengths", None)
    if known is None:
        known = numbers[0].unique_consecutive(return_counts=True)[1].tolist()
        numbers.document_lengths = known
    return known


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """A causal call for each document of so many tokens; [1, tokens, heads, width] (see `attend`)."""
    if sum(lengths) != query.shape[2]:
        raise ValueError(f"documents of {sum(lengths)} tokens in a row of {query.shape[2]}")
    grouped = query.device.type == "cpu"  # kernels of GPUs without flash take no grouped keys
    if not grouped and key.shape[1] != query.shape[1]:
        key, value = _repeated(key, query), _repeated(value, query)
    parts = []
    for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True):
        mask = None if window is None or q.shape[2] <= window else _window(q.shape[2], window, q.device)
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=grouped,
        )  # fmt: skip
        parts.append(mixed.transpose(1, 2))
    return torch.cat(parts, dim=1)


def _repeated(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Grouped keys or values, once for each query head."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


@functools.lru_cache(maxsize=32)
def _window(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[queries, keys]: each token sees itself and the window - 1 tokens before it."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    return (back >= 0) & (back < window)


def _find_kernel() -> tuple[Callable[..., Any], frozenset[str]] | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < AMPERE:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _has_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float, window: int | None) -> bool:
    """Whether torch's kernel computes just this: on CUDA, in 16 bits, without dropout."""
    if _kernel is None or query.device.type != "cuda" or dropout:
        return False
    width = query.shape[-1]
    fits = width == value.shape[-1] and width <= KERNEL_WIDTHS and width % 8 == 0
    in_16_bits = _computed(query).itemsize == 2
    return fits and in_16_bits and (window is None or "window_size" in _kernel[1])


def _computed(states: torch.Tensor) -> torch.dtype:
    """The dtype that they are computed in; the kernel is not on autocast's list."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _in_one_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """All documents by torch's kernel, whose tensors are [tokens, heads, width]."""
    assert _kernel is not None, "_has_kernel has checked it"
    call, names = _kernel
    given: dict[str, Any] = {}
    if "window_size" in names:  # tokens to the left and to the right of each, itself not counted
        given["window_size"] = (-1, 0) if window is None else (window - 1, 0)
    else:
        given["is_causal"] = True
    if "scale" in names:
        given["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    if "enable_gqa" in names:
        given["enable_gqa"] = True
    else:
        key, value = _repeated(key, query), _repeated(value, query)
    dtype = _computed(query)
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    mixed: torch.Tensor = call(q, k, v, bounds, bounds, longest, longest, **given)
    return mixed[None]
