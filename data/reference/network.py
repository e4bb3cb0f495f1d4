"""The network that is trained: Qwen3's architecture in plain PyTorch, with the parameter names of `Qwen3ForCausalLM`.

So what is saved here is served by vLLM and loaded by transformers without a conversion. Leaves to others: data and the
training loop (``train.py``), the larger model (``grow.py``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Network", "Shape", "load", "save"]

THETA = 10_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a network; ``head`` is the width of one attention head, ``epsilon`` what its norms add to a mean."""

    vocabulary: int
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int = 64
    context: int = 2048
    epsilon: float = 1e-6


class Attention(nn.Module):
    """Causal attention with grouped heads, normalised queries and keys, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head, eps=shape.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend to what came before; x of shape (batch, time, width)."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.shape.head)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin
        q, k, v = (part.transpose(1, 2).to(v.dtype) for part in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return mixed


def _half_turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


class Mlp(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x of shape (..., width) to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x of shape (batch, time, width) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """All but the output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.epsilon)


class Network(nn.Module):
    """Next-token model; output and input embeddings are one matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        frequency = THETA ** -(torch.arange(0, shape.head, 2, dtype=torch.float64) / shape.head)
        angle = torch.outer(torch.arange(shape.context, dtype=torch.float64), frequency).repeat(1, 2).float()
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deeper = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if deeper else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of shape (batch, time, vocabulary) from token ids of shape (batch, time)."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def save(network: Network, folder: Path, *, end: int, pad: int) -> None:
    """Write ``config.json``, ``generation_config.json`` and the weights in bfloat16.

    Parameters
    ----------
    network : Network
    folder : Path
    end, pad : int
        Tokens that end a turn, and that fill.
    """
    shape = network.shape
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": end, "pad_token_id": pad}
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in network.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> Network:
    """Read what `save` wrote, as float32."""
    told = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocabulary=told["vocab_size"],
        layers=told["num_hidden_layers"],
        width=told["hidden_size"],
        inner=told["intermediate_size"],
        heads=told["num_attention_heads"],
        kv_heads=told["num_key_value_heads"],
        head=told["head_dim"],
        context=told["max_position_embeddings"],
        epsilon=told["rms_norm_eps"],
    )
    network = Network(shape)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
