"""Makes a tiny random Qwen3 model; serves it, or another one, by vLLM on the CPU. Runs in `install.sh`'s environment.

    $CALIB_VLLM_VENV/bin/python tests/vllm/serve_tiny.py make FOLDER
    $CALIB_VLLM_VENV/bin/python tests/vllm/serve_tiny.py serve FOLDER --port 8100 [--speculative | --draft] [--raw]

The model says nothing sensible; that its probabilities are the same whichever way they are asked for can be checked.
float32, because bfloat16 rounds log-probabilities to steps of about 0.1; blocks of 32 tokens, because shorter prompts
than a block are never cached. `serve` replaces this process, so a signal to it reaches vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""As Qwen3's: the model opens its thought itself, and without thinking an empty one is given."""

NGRAM: dict[str, str | int] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
SPREAD, END_SPREAD = 0.12, 0.16
"""Deviation of the output weights: logits spread by about 1, the end mark's by a little more, so that some
thoughts end."""


def make(folder: Path) -> None:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    words = "question answer option letter yes no think form level state which what Answer: (A) (B)\n\n".split(" ")
    texts = [" ".join(rng.choices(words, k=30)) for _ in range(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, SPREAD)
        model.lm_head.weight[tokenizer.token_to_id("</think>")].normal_(0, END_SPREAD)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def serve(folder: Path, port: int, *, speculation: dict[str, str | int], raw: bool) -> None:
    # with a draft model, vLLM 0.32 for the CPU reads NaN from cached prefixes after a while
    caching = "--no-enable-prefix-caching" if "model" in speculation else "--enable-prefix-caching"
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else the first read compiles for 20 s
    }
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder)),
        *("--served-model-name", folder.name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32"),
        *("--enforce-eager", caching, "--reasoning-parser", "qwen3"),
        *("--logprobs-mode", "raw_logprobs" if raw else "processed_logprobs"),
        *(() if raw else ("--max-logprobs", "64")),
        *(("--speculative-config", json.dumps(speculation)) if speculation else ()),
    ]
    os.execve(command[0], command, environment)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["make", "serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8100)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--speculative", action="store_true", help="speculate by n-grams")
    how.add_argument("--draft", action="store_true", help="or by the model in the folder draft beside FOLDER")
    parser.add_argument("--raw", action="store_true", help="log-probabilities as before any mask")
    arguments = parser.parse_args()
    if arguments.action == "make":
        make(arguments.folder)
        return
    speculation = NGRAM if arguments.speculative else {}
    if arguments.draft:
        draft = str(arguments.folder.with_name("draft"))
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    serve(arguments.folder, arguments.port, speculation=speculation, raw=arguments.raw)


if __name__ == "__main__":
    main()
