"""Tiny random models with a character tokenizer: for tests, `logra doctor` and `recipes/tiny.yaml`. No download, no file."""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=?.,:\n"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character (47 characters and 4 special tokens) and a chat template."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    arch: str = "llama",
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    tied: bool = False,
    positions: int = 256,
    spread: float = 0.02,
) -> PreTrainedModel:
    """A random two-layer float32 model in eval mode; `arch` is "llama" or "gpt2". Global random state is untouched.

    spread: standard deviation of the weights. With 0.02 the frozen head holds the logits near 0; 0.1 lets the model learn.
    """
    size = len(SPECIAL) + len(CHARACTERS)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if arch == "llama":
            model: PreTrainedModel = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=size,
                    hidden_size=hidden,
                    intermediate_size=2 * hidden,
                    num_hidden_layers=layers,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=positions,
                    tie_word_embeddings=tied,
                    initializer_range=spread,
                    **ids,
                )
            )
        elif arch == "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=size,
                    n_embd=hidden,
                    n_layer=layers,
                    n_head=4,
                    n_positions=positions,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                    tie_word_embeddings=tied,
                    initializer_range=spread,
                    **ids,
                )
            )
        else:
            raise ValueError(f"unknown tiny architecture {arch!r}: use 'llama' or 'gpt2'")
    return model.eval()
