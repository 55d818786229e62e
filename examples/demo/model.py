"""The demo's engine: a small random Llama, built locally from a fixed seed.

Initializer range 0.2 makes the greedy output depend on the whole context, so that a wrong byte of KV shows.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 1024
BLOCK_TOKENS = 16
PROMPT_TOKENS = 2_100
NEW_TOKENS = 16


def build_model() -> LlamaForCausalLM:
    """Build the same model in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the same sums in the same order in every process
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.2,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.train(mode=False)
    return model


def build_prompt() -> list[int]:
    """Draw the prompt: 2,100 token ids, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return [int(token) for token in torch.randint(3, VOCABULARY, (PROMPT_TOKENS,), generator=generator)]


class TokenCounter:
    """Counts the tokens that really go through the model's forward pass."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()
