"""Text to token ids and back, as transformers does it with the files of a bundle's ``tokenizer/``.

Rests on the ``tokenizers`` package alone. Which class transformers would choose
(``Qwen2Tokenizer`` for Nano and Super, ``PreTrainedTokenizerFast`` for Edge) makes no difference
to the ids, which a test holds for both.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import BundleError, ConfigError
from motrt.runtime.chat_template import ChatTemplate
from motrt.runtime.tokenizer_files import TokenizerFiles, read_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from motrt.engines.bundle import Bundle
    from motrt.runtime.chat_template import Message
    from motrt.runtime.template_process import TemplateLimits

_REPLACEMENT = "\ufffd"  # what incomplete UTF-8 decodes to


class Tokenizer:
    """A bundle's tokenizer.

    Attributes:
        special_tokens: Names (``eos_token``, ``pad_token``, …) and their text, where set.
    """

    def __init__(self, files: TokenizerFiles, *, limits: TemplateLimits | None = None) -> None:
        self._backend = files.backend
        self._template: ChatTemplate | None = None
        self._template_source = files.chat_template
        self._limits = limits
        self._generation_eos = files.generation_eos_ids
        self.special_tokens = dict(files.special_tokens)

    @classmethod
    def open(cls, bundle: Bundle, *, limits: TemplateLimits | None = None) -> Tokenizer:
        """Open the tokenizer of a bundle.

        Raises:
            BundleError: The bundle has none, or its files are damaged.
        """
        if "tokenizer" not in bundle.manifest.components:
            reason = bundle.manifest.absent.get("text_tokenizer", "not recorded")
            raise BundleError(
                "the bundle has no tokenizer",
                got=f"text_tokenizer: {reason}",
                expected="tokenizer/tokenizer.json",
                fix="Put the model's text_tokenizer/ into the checkpoint and export it again: "
                "motrt export CHECKPOINT -o BUNDLE, or pass token ids.",
            )
        folder = bundle.path("tokenizer")
        recorded = {
            PurePosixPath(name).name
            for name in bundle.manifest.files
            if name.startswith("tokenizer/")
        }
        return cls(read_tokenizer_files(folder, recorded), limits=limits)

    @classmethod
    def from_folder(cls, folder: Path, *, limits: TemplateLimits | None = None) -> Tokenizer:
        """Open a folder with ``tokenizer.json`` and ``tokenizer_config.json``.

        Raises:
            BundleError: A file is absent or damaged.
        """
        return cls(read_tokenizer_files(folder), limits=limits)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; embedding tables are often padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int:
        """The id that ends a turn and a generator's prompt.

        Raises:
            BundleError: The tokenizer names none.
        """
        if "eos_token" not in self.special_tokens:
            raise BundleError(
                "the tokenizer has no eos_token",
                expected='"eos_token" in tokenizer_config.json',
                fix="Export a checkpoint whose text_tokenizer/ is complete.",
            )
        return self.token_id(self.special_tokens["eos_token"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: ``generation_config.json``'s, then ``eos_token``'s."""
        own = (self.eos_token_id,) if "eos_token" in self.special_tokens else ()
        return tuple(dict.fromkeys((*self._generation_eos, *own)))

    def token_id(self, token: str) -> int:
        """Return the id of one token by its text, such as ``<|vision_start|>``.

        Raises:
            BundleError: The vocabulary lacks it.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            raise BundleError(
                "the tokenizer lacks a token",
                got=repr(token),
                expected=f"one of its {self.vocab_size} tokens",
                fix="Export a checkpoint with the tokenizer that belongs to it.",
            )
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Special tokens that the text spells out become their ids, as in transformers.

        Args:
            text: Any text, the empty one included.
            add_special_tokens: Whether to add what the tokenizer puts around every text; the
                published ones put nothing.

        Raises:
            ConfigError: It is no text, or holds half a surrogate pair.
        """
        if not isinstance(text, str):
            raise ConfigError("the prompt is no text", got=type(text).__name__, expected="str")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as err:  # the package's word for a lone surrogate
            raise ConfigError(
                "the text is no Unicode", got="half a surrogate pair", expected="whole characters"
            ) from err

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids; ids beyond the vocabulary have none, as in transformers.

        Raises:
            ConfigError: An id is no natural number below 2**32.
        """
        try:
            numbers = [int(number) for number in ids]
            return self._backend.decode(numbers, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError, ValueError) as err:
            raise ConfigError("a token id makes no sense", got=err, expected="0 or more") from err

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            BundleError: The tokenizer has none.
        """
        if self._template is None:
            if self._template_source is None:
                raise BundleError(
                    "the tokenizer has no chat template",
                    expected="chat_template.jinja or a chat_template in tokenizer_config.json",
                    fix="Export a checkpoint that has one, or pass token ids.",
                )
            self._template = ChatTemplate(
                self._template_source, special_tokens=self.special_tokens, limits=self._limits
            )
        return self._template

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation; errors are those of :meth:`ChatTemplate.render`."""
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """End the process that renders chat templates, if one runs."""
        if self._template is not None:
            self._template.close()


class StreamDecoder:
    """Token ids in, one at a time; text out as soon as no later token can change it.

    The pieces and :meth:`flush` together equal ``decode`` of all ids. A byte-level token may hold
    a part of a character; the decoder shows it as one U+FFFD at the end, which is kept back.

    Args:
        tokenizer: Whose ids they are.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # ids before the pending ones: some decoders look back
        self._pending: list[int] = []
        self._num_given = 0  # characters of the pending text that are out

    def push(self, token_id: int) -> str:
        """Take an id and return the text that is now certain, which may be empty.

        Raises:
            ConfigError: The id makes no sense.
        """
        self._pending.append(token_id)
        try:
            text = self._text()
        except ConfigError:
            self._pending.pop()
            raise
        certain = text.removesuffix(_REPLACEMENT)
        piece = certain[self._num_given :]
        if certain != text:
            self._num_given = len(certain)
            return piece
        if text:
            self._context = self._pending
        self._pending = []
        self._num_given = 0
        return piece

    def flush(self) -> str:
        """Return what is kept back, for no id follows; then start over."""
        piece = self._text()[self._num_given :]
        self._context, self._pending, self._num_given = [], [], 0
        return piece

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
