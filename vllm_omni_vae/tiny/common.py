# SPDX-License-Identifier: Apache-2.0
"""What the tiny families share: random weights, a check for torchvision, and a tokenizer with its UMT5 text encoder."""

import math
import string
from typing import TypeVar

import torch
from torch import nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from vllm_omni_vae.errors import ConfigurationError
from vllm_omni_vae.pipelines.processors import missing_torchvision

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MAX_PROMPT_TOKENS = 512


@torch.no_grad()
def randomize(module: ModuleT, generator: torch.Generator) -> ModuleT:
    """Fill every parameter of ``module`` in place from ``generator`` alone, and return it in evaluation mode.

    Whatever the constructor left, zero-initialised gates and ``torch.empty`` tokens included, is replaced: matrices
    and kernels keep the variance of their input, per-channel scales lie within 5 % of one, biases within 0.1 of zero. A
    single number without dims is a constant of the model and stays.
    So activations stay finite and no output is constant. Draws are uniform because normal ones go through a vectorised
    logarithm and cosine, whose last bits may differ between CPUs.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            continue
        if name.endswith("bias"):
            parameter.uniform_(-0.1, 0.1, generator=generator)
        elif parameter.numel() == parameter.shape[0]:
            parameter.uniform_(0.95, 1.05, generator=generator)
        else:
            bound = math.sqrt(3 / parameter[0].numel())
            parameter.uniform_(-bound, bound, generator=generator)
    return module.eval()


def require_torchvision(component: str, processor: str) -> None:
    """Refuse to make the class ``processor`` of transformers where it cannot be made.

    Raises:
        ConfigurationError: torchvision is not installed.
    """
    for reason in missing_torchvision({component: ["transformers", processor]}):
        raise ConfigurationError(reason)


def t5_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer with one token per printable ASCII character and ``</s>`` at the end; others become ``<unk>``."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    characters = [(c, -3.0) for c in string.digits + string.ascii_letters + string.punctuation]
    return T5Tokenizer(vocab=specials + characters, extra_ids=0, model_max_length=_MAX_PROMPT_TOKENS)


def umt5_text_encoder(tokenizer: T5Tokenizer, generator: torch.Generator, *, width: int) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder over ``tokenizer``; its embeddings have ``width`` channels, a multiple of 4."""
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
    )
    return randomize(UMT5EncoderModel(config), generator)
