"""The reasoner's weights as onnxruntime-genai runs them: its own exporter, its own decode loop.

For text all three position axes count alike, so the reasoner is a Qwen3 model of other names.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from safetensors.numpy import load_file, save_file

from motrt.engines.errors import ExecutionError

if TYPE_CHECKING:
    from pathlib import Path

    from motrt.engines.tensors import Array

_NAMES = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out": "o_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_GENERATOR = ("_moe_gen", ".add_", ".to_add_out", ".norm_added_", "proj_in", "proj_out", "time_")
_SAME_KEYS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
)


class GenAi:
    """A decode loop of onnxruntime-genai.

    Args:
        checkpoint: A checkpoint of this bench.
        folder: Where to write the converted model; must not exist.
        threads: Threads inside an operator.

    Raises:
        ExecutionError: Its exporter failed.
    """

    def __init__(self, checkpoint: Path, folder: Path, threads: int) -> None:
        _write_qwen3(checkpoint / "transformer", folder / "qwen3")
        model = folder / "model"
        command = [
            sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "qwen3"),
            "-o", str(model), "-p", "fp32", "-e", "cpu", "-c", str(folder / "cache"),
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ExecutionError(
                "onnxruntime-genai could not export the bench's model",
                got=(done.stderr.strip().splitlines() or ["no message"])[-1],
                fix="Uninstall it, or run other rows with --rows.",
            )
        path = model / "genai_config.json"
        config = json.loads(path.read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        path.write_text(json.dumps(config))
        self._genai: Any = importlib.import_module("onnxruntime_genai")
        self._model = self._genai.Model(str(model))

    def decode(self, ids: Array, count: int) -> tuple[list[int], float]:
        """Decode greedily; see :meth:`Ours.decode`."""
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=len(ids) + count)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(ids.astype("int32"))
        generator.generate_next_token()
        started = time.perf_counter()
        for _ in range(count - 1):
            generator.generate_next_token()
        seconds = time.perf_counter() - started
        return generator.get_sequence(0)[len(ids) :].tolist(), seconds


def _write_qwen3(source: Path, target: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    rest = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,  # it wants one; the bench's greedy answers do not have it
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    same = {key: config[key] for key in _SAME_KEYS}
    (target / "config.json").write_text(json.dumps(same | rest))
    (file,) = source.glob("*.safetensors")
    tensors = {
        _qwen3_name(name): tensor
        for name, tensor in load_file(file).items()
        if not any(part in name for part in _GENERATOR)
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    # The exporter insists on a tokenizer; nothing is ever tokenized.
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(target / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def _qwen3_name(name: str) -> str:
    renamed = ".".join(_NAMES.get(part, part) for part in name.split("."))
    return renamed if name.startswith("lm_head.") else f"model.{renamed}"
