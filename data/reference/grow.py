"""Makes a larger model of a trained one: wider, deeper, and the same answers before it is trained on.

    python data/reference/grow.py DIR/main DIR/large

The reference model is so small that a server spends its time on launching kernels, and drafting costs more than it
saves. This one has the cost of a model of five billion parameters, and the small model's skills:

* width: new channels of the residual stream start at zero. A mean square over eight times the channels, seven of eight
  zero, is an eighth, which the norms' weights make up for, and so is what they add to it. New heads and new inner
  channels read with random weights and write zeros.
* depth: new blocks stand behind each old one, and write zeros.

With ``--seconds`` it is trained on from there, all of the new weights free; without, it computes what the small one
does up to rounding, so that a comparison of the two is one of cost alone.
"""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import replace
from pathlib import Path

import torch
from network import Network, load
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import appraise, draw_rows, jobs, on_device, save_all, train, workers

log = logging.getLogger("grow")

WRITERS = ("o_proj.weight", "down_proj.weight")
"""What writes into the residual stream."""


def grown(small: Network, *, layers: int, width: int, inner: int, device: torch.device | None = None) -> Network:
    """A network that computes what ``small`` does.

    Parameters
    ----------
    small : Network
    layers, width, inner : int
        Multiples of the small one's layers and width; the number of heads grows with the width.
    device : torch.device, optional
        Where it is made.

    Raises
    ------
    ValueError
        Sizes that are no multiples, or smaller.
    """
    old = small.shape
    if layers % old.layers or width % old.width or inner < old.inner:
        raise ValueError(f"{layers} layers of width {width} and {inner} cannot hold {old}")
    times, each = width // old.width, layers // old.layers
    shape = replace(
        old,
        layers=layers,
        width=width,
        inner=inner,
        heads=old.heads * times,
        kv_heads=old.kv_heads * times,
        epsilon=old.epsilon / times,
    )
    with device or torch.device("cpu"):
        large = Network(shape)
    shrunk = math.sqrt(old.width / width)
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            if name.endswith(WRITERS):
                parameter.zero_()
        large.model.embed_tokens.weight.zero_()
        _put(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
        _put_norm(large.model.norm, small.model.norm, shrunk)
        for i, block in enumerate(small.model.layers):
            target = large.model.layers[i * each]
            for name, parameter in block.named_parameters():
                if parameter.dim() == 2:
                    _put(target.get_parameter(name), parameter)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                _put_norm(target.get_submodule(norm), block.get_submodule(norm), shrunk)
            for norm in ("self_attn.q_norm", "self_attn.k_norm"):
                _put_norm(target.get_submodule(norm), block.get_submodule(norm), 1.0)
    return large


def _put(large: Tensor, small: Tensor) -> None:
    """Old weights into the corner."""
    rows, columns = small.shape
    large[:rows, :columns] = small


def _put_norm(large: nn.Module, small: nn.Module, shrunk: float) -> None:
    weight, old = large.get_parameter("weight"), small.get_parameter("weight")
    weight.fill_(shrunk)
    weight[: len(old)] = old * shrunk


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path, help="folder of the trained model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=6144)
    parser.add_argument("--seconds", type=float, default=0, help="of training on; 0 for none")
    parser.add_argument("--texts", type=int, default=64_000)
    parser.add_argument("--batch", type=int, default=32, help="rows of 512 tokens a step")
    parser.add_argument("--appraise", type=int, default=0, help="held-out cases a task")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(given.small / "tokenizer.json"))
    sizes = {"layers": given.layers, "width": given.width, "inner": given.inner}
    network = grown(load(given.small), **sizes, device=device)
    log.info("%.2fM parameters", sum(parameter.numel() for parameter in network.parameters()) / 1e6)
    if given.seconds > 0:
        with workers(tokenizer) as pool:
            rows = on_device(pool.map(draw_rows, jobs(given.texts, 500_000), chunksize=1), device)
        train(network, rows, seconds=given.seconds, batch=given.batch, rate=1e-4, compiled=False, warm_up=20)
    save_all(network, tokenizer, given.out)
    log.info("wrote %s", given.out)
    if given.appraise:
        appraise(network, tokenizer, given.appraise)


if __name__ == "__main__":
    main()
