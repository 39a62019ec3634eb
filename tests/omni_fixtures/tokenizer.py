"""A byte-level BPE tokenizer of under 512 ids with Qwen's special tokens and a ChatML template.

Needs ``tokenizers`` only. Trained on the lines below when it is asked for, so nothing binary is
kept in the repository.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from omni_fixtures.files import write_json

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
# In the published order. As there, they follow the byte-pair vocabulary.
SPECIAL_TOKENS = (
    PAD_TOKEN,
    "<|im_start|>",
    EOS_TOKEN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Single ids that a decoder must not drop as special.
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

# 256 bytes and 224 merges; with the added tokens 500 ids. Fewer than the fixtures' 512 embedding
# rows, as in the published models (151669 of 151936).
_BYTE_PAIR_SIZE = 480

_PRE_TOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- set count = namespace(image=0, video=0) -%}
{%- macro render(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{%- set count.image = count.image + 1 -%}
{%- if add_vision_id %}{{ 'Picture ' ~ count.image ~ ': ' }}{% endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{%- set count.video = count.video + 1 -%}
{%- if add_vision_id %}{{ 'Video ' ~ count.video ~ ': ' }}{% endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_CORPUS = (
    "You are a helpful assistant who will generate videos from a given text description.",
    "You are a helpful assistant who will give images from a given prompt.",
    "The video is 1.0 seconds long and is of 24 FPS. This video is of 256x256 resolution.",
    "The video is not 7.9 seconds long and is not of 16 FPS.",
    "This image is of 720x1280 resolution. This image is not of 480x832 resolution.",
    "A red square moves left across a white table while the camera stays still.",
    "The robot arm picks up the blue cup and places it on the wooden shelf.",
    "What will the red square do next? It will keep moving until it reaches the edge.",
    "A car drives through the rain at night; street lights shine on the wet road.",
    "Two people walk along the beach and the waves roll slowly towards the shore.",
    "The gripper opens, moves forward, closes around the handle and lifts the drawer.",
    "Describe the scene, then say what happens after the ball hits the wall.",
    '{"actions": [{"time": "0-1", "description": "move the gripper to the left"}]}',
    '{"duration": 2.0, "fps": 24, "resolution": {"H": 480, "W": 832}, "aspect_ratio": "16:9"}',
    "user assistant system: the first frame is clean, the others are noise.",
)


def build_tokenizer(
    corpus: Sequence[str] = _CORPUS, byte_pair_size: int = _BYTE_PAIR_SIZE
) -> Tokenizer:
    """Train the tokenizer; every call returns equal ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=byte_pair_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in PLAIN_ADDED_TOKENS]
    )
    return tokenizer


def save_tokenizer(
    directory: Path,
    tokenizer: Tokenizer | None = None,
    *,
    tokenizer_class: str = "Qwen2Tokenizer",
) -> Path:
    """Write the files of a transformers tokenizer into ``directory`` and return it.

    By hand, so that the chat template stays inside ``tokenizer_config.json`` as in published
    checkpoints; transformers 5 would write it to a file of its own.
    """
    tokenizer = tokenizer or build_tokenizer()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(index): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    additional = [token for token in SPECIAL_TOKENS if token != PAD_TOKEN]
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": additional,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS_TOKEN,
            "errors": "replace",
            "model_max_length": 262144,
            "pad_token": PAD_TOKEN,
            "split_special_tokens": False,
            "tokenizer_class": tokenizer_class,
            "unk_token": None,
        },
    )
    write_json(
        directory / "special_tokens_map.json",
        {
            "additional_special_tokens": additional,
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
        },
    )
    return directory
