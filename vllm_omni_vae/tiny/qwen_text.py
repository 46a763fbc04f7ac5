# SPDX-License-Identifier: Apache-2.0
"""What the tiny pipelines with a Qwen text encoder share: the tokenizer, and Qwen3."""

import re
from collections.abc import Sequence
from itertools import chain

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from vllm_omni_vae.tiny.common import randomize

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def qwen_tokenizer(whole: Sequence[str] = ()) -> Qwen2Tokenizer:
    """A byte-level Qwen tokenizer with the special tokens of images and chats; it encodes every text.

    A word, with the space before it, is one token if it occurs in one of the texts ``whole``. So the system prompts
    that the pipelines count in tokens keep their length. Other words are spelled.
    """
    words = dict.fromkeys(chain.from_iterable(map(_words, whole)))
    # A word after a space goes first: it starts with a letter that no other has, so its pieces match nowhere else.
    ordered = sorted(words, key=lambda word: not word.startswith("\u0120"))
    merges = dict.fromkeys((word[:end], word[end]) for word in ordered for end in range(1, len(word)))
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)])
    return Qwen2Tokenizer(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=list(merges),
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=_CHAT_TEMPLATE,
        model_max_length=32768,
    )


def _words(text: str) -> list[str]:
    """The pieces that the tokenizer never merges across, in its alphabet, where each byte is a letter."""
    splitter = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    plain = [part for part in re.split("|".join(map(re.escape, SPECIAL_TOKENS)), text) if part]
    return [word for part in plain for word, _ in splitter.pre_tokenize_str(part)]


def qwen3_text_encoder(
    tokenizer: Qwen2Tokenizer, generator: torch.Generator, *, width: int, layers: int
) -> Qwen3ForCausalLM:
    """Qwen3 over ``tokenizer`` with hidden states of ``width`` channels, a multiple of 8."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomize(Qwen3ForCausalLM(config), generator)
