"""One object, both modes: open a bundle, ask it, let it generate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from motrt.engines.arguments import of_kind
from motrt.engines.bundle import Bundle
from motrt.engines.errors import ConfigError
from motrt.engines.refit.live import refit_engines
from motrt.engines.refit.request import open_request
from motrt.runtime.answering import ReasonStream, answer, as_messages
from motrt.runtime.backends import open_backend
from motrt.runtime.bundle_vae import open_vae, required_vae
from motrt.runtime.generating import GenerationRun
from motrt.runtime.generation_params import ActionCondition, GenerationParams
from motrt.runtime.images import clip_pixels
from motrt.runtime.latents_file import Latents, load_latents
from motrt.runtime.one_call import OneCall
from motrt.runtime.params import SamplingParams
from motrt.runtime.results import ReasonResult
from motrt.runtime.sampling_plan import Conditioning
from motrt.runtime.text_model import TextModel, TokenSequence
from motrt.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from motrt.engines.onnxruntime_backend import Residency
    from motrt.engines.refit.lora import Lora
    from motrt.engines.refit.result import RefitResult
    from motrt.engines.tensors import Array
    from motrt.runtime.denoise import Callback
    from motrt.runtime.images import ImageSource
    from motrt.runtime.protocols import Backend
    from motrt.runtime.results import GenerationResult
    from motrt.runtime.vae import Vae
    from motrt.runtime.video import ClipSource, Keep

OutputFilter = Callable[["Array"], "Array"]


class Runtime:
    """A bundle at work. Use :meth:`open`, and close it or use it in a ``with`` statement.

    One call at a time: a second thread waits, or gets an error, as ``on_busy`` says. A thread whose
    own call has not ended (an open stream, a callback) would wait for itself, and gets an error.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        *,
        capacity: int,
        chunk_size: int,
        on_busy: Literal["wait", "raise"],
        output_filter: OutputFilter | None,
    ) -> None:
        self.bundle = bundle
        self._backend = backend
        self._capacity = capacity
        self._chunk_size = chunk_size
        self._busy = OneCall(on_busy)
        self._output_filter = output_filter
        self._streams: weakref.WeakSet[ReasonStream] = weakref.WeakSet()
        self._tokenizer: Tokenizer | None = None
        self._text: TextModel | None = None
        self._sequence: TokenSequence | None = None
        self._vae: Vae | None = None

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        *,
        backend: str | Callable[[Bundle], Backend] = "onnxruntime",
        residency: Residency = "separate",
        capacity: int = 4096,
        chunk_size: int = 256,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        on_busy: Literal["wait", "raise"] = "wait",
        output_filter: OutputFilter | None = None,
    ) -> Runtime:
        """Open a bundle; engines are loaded when they are first needed.

        Args:
            bundle: The folder.
            backend: ``onnxruntime``; ``tensorrt`` or ``tensorrt-rtx``, for which the bundle has a
                plan of this machine (``motrt build``); or a function that makes one of a bundle.
            residency: How weights lie in memory: ``separate``, ``shared`` or ``swap``; see
                :mod:`motrt.engines.onnxruntime_backend` and :mod:`motrt.engines.tensorrt_backend`.
            capacity: Most tokens of a conversation or prompt.
            chunk_size: Most tokens of one prefill call.
            threads: Threads inside an operator; the backend's default if None.
            providers: ONNX Runtime's execution providers. One that is absent is an error.
            on_busy: What a second thread gets: it waits, or :class:`ExecutionError`.
            output_filter: Sees each chunk of frames, uint8 ``[n, H, W, 3]``, before anybody else
                and returns what may be shown: a safety checker, which bundles lack.

        Raises:
            BundleError: The bundle is absent, damaged, or newer than this motrt.
            ConfigError: A setting makes no sense.
            ExecutionError: The backend cannot run the bundle's precision, or there is no GPU.
            MissingDependencyError: The backend is not installed.
            PlanError: The bundle has no plan for this machine, or it is not what it was.
        """
        OneCall(on_busy)  # refuses another word before anything is opened
        if capacity < 1 or chunk_size < 1:
            raise ConfigError(
                "capacity and chunk_size count tokens",
                got=f"{capacity}, {chunk_size}",
                expected="at least 1",
            )
        if output_filter is not None and not callable(output_filter):
            raise ConfigError(
                "output_filter is no function",
                got=type(output_filter).__name__,
                expected="a callable",
            )
        opened = Bundle.open(bundle)
        return cls(
            opened,
            open_backend(
                opened, backend, residency=residency, providers=providers, threads=threads
            ),
            capacity=capacity,
            chunk_size=chunk_size,
            on_busy=on_busy,
            output_filter=output_filter,
        )

    def reason(
        self,
        prompt: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
    ) -> ReasonResult:
        """Answer a prompt or a conversation.

        What a conversation shares with the one before is not computed again.

        Args:
            prompt: Text, or messages ``{"role", "content"}``.
            params: Greedy with at most 1024 tokens if None.
            system: A system message for a lone text.

        Raises:
            BundleError: The bundle has no tokenizer or no chat template.
            ConfigError: The prompt is longer than the capacity, or makes no sense.
            ExecutionError: The engine failed, gave NaN, or is busy.
        """
        return self.reason_stream(prompt, params, system=system).result

    def reason_stream(
        self,
        prompt: str | Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
    ) -> ReasonStream:
        """Answer piece by piece; see :meth:`reason`."""
        params = SamplingParams() if params is None else of_kind(SamplingParams, "params", params)
        stream = ReasonStream(self._answer(as_messages(prompt, system), params))
        self._streams.add(stream)
        return stream

    def generate(
        self,
        prompt: str,
        params: GenerationParams | None = None,
        *,
        image: ImageSource | None = None,
        video: ClipSource | None = None,
        condition_frame_indexes: Sequence[int] = (0, 1),
        condition_video_keep: Keep = "first",
        action: ActionCondition | None = None,
        latents: Latents | str | Path | None = None,
        history: ReasonResult | None = None,
        callback_on_step_end: Callback | None = None,
    ) -> GenerationResult:
        """Generate an image, a clip, sound latents or actions.

        Args:
            prompt: What to make.
            params: diffusers' defaults if None.
            image: First frame of the clip.
            video: Clip to go on from, or to read actions off.
            condition_frame_indexes: Latent frames that ``video`` fixes.
            condition_video_keep: Which end of a longer ``video`` counts.
            action: For the three action modes; the clip then has ``chunk_size + 1`` frames.
            latents: Where to start instead of seeded noise, or a file of them. As in diffusers they
                hold the clean frames too; what ``image`` or ``video`` encode to is not put in.
            history: An answer of :meth:`reason`, from whose conversation the prompt goes on.
            callback_on_step_end: Called as ``(step, timestep, state)`` after each step.

        Raises:
            BundleError: The bundle lacks a part that the request needs.
            ConfigError: The request makes no sense; found before anything is computed.
            ExecutionError: An engine failed, gave NaN, or is busy.
        """
        params = (
            GenerationParams() if params is None else of_kind(GenerationParams, "params", params)
        )
        if history is not None:
            of_kind(ReasonResult, "history", history)
        if action is not None:
            of_kind(ActionCondition, "action", action)
        if isinstance(latents, (str, Path)):
            latents = load_latents(latents)
        elif latents is not None:
            of_kind(Latents, "latents", latents)
        given = Conditioning(
            image,
            video,
            tuple(condition_frame_indexes),
            condition_video_keep,
            action,
            latents,
        )
        with self._busy():
            run = GenerationRun(
                bundle=self.bundle,
                backend=self._backend,
                tokenizer=self._tokens(),
                text=self._text_model(),
                vae=self._vae_of_bundle(),
                conversation=None if history is None else self._sequence,
                decode=self._decode,
            )
            try:
                return run(prompt, params, given, history, callback_on_step_end)
            except BaseException:
                if history is not None:
                    self._sequence = None  # its cache may hold half a step
                raise

    def encode(self, clip: Array) -> Array:
        """Encode a clip to the latents that generations work with.

        Args:
            clip: uint8 ``[F, H, W, 3]``; F is 1 + n times the VAE's temporal factor.

        Returns:
            float32 ``[1, C, T, h, w]``, normalized.

        Raises:
            BundleError: The bundle has no VAE.
            ConfigError: The clip is of another type, or of a size that the VAE cannot make.
            ExecutionError: An engine failed, gave NaN, or is busy.
        """
        pixels = clip_pixels(clip)
        with self._busy():
            return self._vae_or_refuse("clips cannot be encoded").encode(pixels)

    def decode(self, latents: Array) -> Array:
        """Decode latents ``[1, C, T, h, w]`` to frames, uint8 ``[F, H, W, 3]``, all at once.

        :meth:`GenerationResult.frames` holds one chunk at a time.

        Raises:
            BundleError: The bundle has no VAE.
            ConfigError: The latents are of another shape or type, or not finite.
            ExecutionError: As :meth:`encode`.
        """
        return np.concatenate(list(self._decode(latents)))

    def refit(
        self,
        weights: str | Path | None = None,
        *,
        lora: Lora | str | Path | Sequence[Lora | str | Path] = (),
        restore: bool = False,
    ) -> RefitResult:
        """Give both engines other weights, or neither; the bundle on disk stays as it is.

        Weights are computed from those that were exported, whatever runs now. A conversation's keys
        and values are forgotten: they are the old weights'.

        Args:
            weights: A checkpoint of the same model.
            lora: Adapters, applied to ``weights`` or to the exported weights; a path has scale 1.
            restore: Go back to the exported weights; excludes the other two.

        Returns:
            What changed; ``changed`` is False if the weights were running already.

        Raises:
            ConfigError: Nothing is asked for, or too much.
            RefitError: The new weights do not fit or are not finite, or the probe failed.
            ExecutionError: An engine does not take them, the backend cannot be refitted, or busy.
        """
        with self._busy():
            wanted = open_request(self.bundle, weights, lora, restore=restore)
            return refit_engines(self._backend, self.bundle, wanted, self._switch)

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the conversation's keys and values now."""
        return 0 if self._sequence is None else self._sequence.nbytes

    def close(self) -> None:
        """Let go of engines, caches and processes; a closed runtime cannot be used again.

        Open streams end where they are; another thread's call is waited for.

        Raises:
            ExecutionError: Called from a callback.
        """
        for stream in list(self._streams):
            with suppress(ValueError):  # another thread is at its next token
                stream.close()
        with self._busy.closing():
            self._sequence = self._text = None
            if self._vae is not None:
                self._vae.close()
            if self._tokenizer is not None:
                self._tokenizer.close()
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _switch(self, bundle: Bundle) -> None:
        self.bundle, self._text, self._sequence = bundle, None, None

    def _answer(
        self, messages: list[dict[str, Any]], params: SamplingParams
    ) -> Iterator[str | ReasonResult]:
        with self._busy():
            tokenizer = self._tokens()
            if self._sequence is None:
                self._sequence = TokenSequence(self._text_model())
            sequence = self._sequence
            try:
                yield from answer(tokenizer, sequence, messages, params)
            except BaseException:
                # The cache may hold half a step, also after Ctrl-C: start afresh.
                self._sequence = None
                raise

    def _decode(self, latents: Array) -> Iterator[Array]:
        chunks = self._vae_or_refuse("latents cannot be decoded, only saved as .npz").decode(
            latents
        )
        while True:
            with self._busy():  # chunk by chunk: who reads frames slowly keeps nobody waiting
                frames = next(chunks, None)
                if frames is not None and self._output_filter is not None:
                    frames = self._output_filter(frames)
            if frames is None:
                return
            yield frames

    def _text_model(self) -> TextModel:
        if self._text is None:
            self._text = TextModel(
                self.bundle,
                self._backend,
                capacity=self._capacity,
                chunk_size=self._chunk_size,
            )
        return self._text

    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.open(self.bundle)
        return self._tokenizer

    def _vae_of_bundle(self) -> Vae | None:
        if self._vae is None:
            self._vae = open_vae(self.bundle, self._backend)
        return self._vae

    def _vae_or_refuse(self, refusal: str) -> Vae:
        return required_vae(self._vae_of_bundle(), self.bundle, refusal)
