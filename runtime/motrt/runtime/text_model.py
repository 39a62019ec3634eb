"""The reasoner over token ids: prefill, decode, and the context for the generator.

Knows embeddings, positions and the cache; knows nothing of text, sampling or images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motrt.engines.errors import ConfigError, ExecutionError
from motrt.engines.rotary import rotary_tables
from motrt.engines.weight_names import EMBED_TOKENS
from motrt.runtime.positions import text_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motrt.engines.bundle import Bundle
    from motrt.engines.tensors import Array
    from motrt.runtime.protocols import Backend, Context, ReasonerEngine

_TABLE_ROWS = 1024


class TextModel:
    """What every sequence of a bundle shares.

    Args:
        bundle: Gives embeddings, rotary frequencies and types.
        backend: Gives the causal engine.
        capacity: Most tokens of a sequence.
        chunk_size: Most tokens of one prefill call; it bounds the memory of a long prompt.
    """

    def __init__(
        self, bundle: Bundle, backend: Backend, *, capacity: int, chunk_size: int = 256
    ) -> None:
        self.config = bundle.manifest.model
        self.capacity = capacity
        self.chunk_size = chunk_size
        self._backend = backend
        self._dtype = bundle.dtype.numpy
        self._embed_tokens = np.asarray(bundle.weights()[EMBED_TOKENS])
        self._inv_freq = np.array(bundle.manifest.inv_freq, np.float32)
        self._axes = bundle.manifest.rotary_axes
        self._text_tables = self.rotary(text_positions(0, 0))

    @property
    def engine(self) -> ReasonerEngine:
        """The causal engine. Asked for anew each time: a reference would keep it from a swap."""
        return self._backend.reasoner()

    def embed(self, ids: Array) -> Array:
        """Return embedding rows of int64 ``[S]``, compute type ``[1, S, E]``.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab_size):
            raise ConfigError(
                "a token id is outside the vocabulary",
                got=f"{ids.min()} to {ids.max()}",
                expected=f"0 to {self.config.vocab_size - 1}",
                fix="Use the tokenizer that belongs to this bundle.",
            )
        return self._embed_tokens[ids][None]

    def rotary(self, position_ids: Array) -> tuple[Array, Array]:
        """Return cos and sin for positions ``[3, S]``, compute type ``[1, S, D/2]`` each."""
        cos, sin = rotary_tables(self._inv_freq, self._axes, position_ids)
        return cos.astype(self._dtype)[None], sin.astype(self._dtype)[None]

    def text_rotary(self, start: int, count: int) -> tuple[Array, Array]:
        """Return cos and sin for text at ``start`` and on; from a table, which decoding rereads."""
        end = start + count
        rows = self._text_tables[0].shape[1]
        if end > rows:  # doubled, or a long prompt's chunks would compute it again and again
            rows = max(end, 2 * rows, _TABLE_ROWS)
            self._text_tables = self.rotary(text_positions(0, rows))
        cos, sin = self._text_tables
        return cos[:, start:end], sin[:, start:end]

    def check_length(self, count: int, new: int = 0) -> None:
        """Refuse, before anything is computed, what the cache cannot hold.

        Raises:
            ConfigError: ``count`` prompt tokens and ``new`` further ones exceed the capacity.
        """
        if count + new > self.capacity:
            raise ConfigError(
                "the prompt is longer than the K/V cache",
                got=f"{count} tokens" + (f" and {new} new ones" if new else ""),
                expected=f"at most {self.capacity}",
                fix="Shorten the prompt, or open the runtime with a larger capacity (--capacity).",
            )


class TokenSequence:
    """Token ids and their keys and values.

    Args:
        model: The model.
    """

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self.ids: list[int] = []
        self._cache = model.engine.new_cache(model.capacity)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        nbytes: int = self._cache.nbytes
        return nbytes

    def extend(self, ids: Sequence[int]) -> Array:
        """Append tokens, chunk by chunk.

        Returns:
            Logits of the last one, float32 ``[V]``.

        Raises:
            ConfigError: No tokens, one outside the vocabulary, or more than fit.
            ExecutionError: The logits are not finite.
        """
        if not len(ids):
            raise ConfigError("there are no tokens to run", expected="at least one")
        model = self.model
        model.check_length(len(self.ids) + len(ids))
        array = np.asarray(ids, np.int64)
        embeds = model.embed(array)
        logits = np.empty((0,), np.float32)
        for start in range(0, len(array), model.chunk_size):
            chunk = embeds[:, start : start + model.chunk_size]
            count = chunk.shape[1]
            cos, sin = model.text_rotary(len(self.ids), count)
            last = np.array([[count - 1]], np.int64)
            logits = model.engine.forward(self._cache, chunk, cos, sin, last)[0, 0]
            self.ids += array[start : start + count].tolist()
        if not np.isfinite(logits).all():
            raise ExecutionError(
                "the reasoner's logits are not finite",
                got=f"NaN or infinity after token {len(self.ids)}",
                fix="Check the bundle with: motrt inspect BUNDLE --verify",
            )
        return logits

    def rewind_to_prefix_of(self, ids: Sequence[int]) -> int:
        """Keep what this sequence shares with ``ids``, forget the rest.

        One token of ``ids`` is always left to run, since its logits are wanted.

        Returns:
            How many of ``ids`` need not be run.
        """
        shared = 0
        for have, want in zip(self.ids, ids[:-1], strict=False):
            if have != want:
                break
            shared += 1
        self._cache.truncate(shared)
        del self.ids[shared:]
        return shared

    def context(self) -> Context:
        """Return the generator's ``context.{i}.key|value`` of all tokens."""
        context: Context = self._cache.context()
        return context
