"""Trains the reference model and its draft model from nothing, on one GPU.

    python data/reference/train.py --out DIR

makes ``DIR/main`` and ``DIR/draft``, each with tokeniser and chat template, ready for ``vllm serve``. It takes
ten minutes on one NVIDIA H200 with 16 processor cores; ``--seconds``, ``--draft-seconds`` and ``--texts`` make it
shorter. Needs PyTorch, tokenizers, transformers and safetensors.

Half of the texts answer at once, the others think first; both start from the same user turn, and only the generation
prompt differs (``<think>`` and a newline, or nothing), so that the model does what the prompt says. Labels, digits and
newlines are tokens of their own everywhere: what is read at inference is what was trained. Question text is noise to
this model and weighs little in the loss; the label of an answer without a thought weighs most, since it is the only
token that System 1 is made of.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import tasks
import torch
from network import Network, Shape, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

log = logging.getLogger("train")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDS = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
IS = "\u0120is"
"""The token before a label in a thought: a blank and the word, as byte-level pairs write it."""

WHOLE = ("<think>", "</think>", "yes", "no")
"""Tokens that must never be split or merged, beside single letters and digits."""

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is true %}{{ '<think>\n' }}{%- endif %}{%- endif %}"
)

SHORT, LONG = 512, 2048
"""Row lengths, tokens: texts that fit share short rows, longer ones get long rows."""

WEIGHTS = (0.02, 1.0, 3.0, 10.0, 5.0)
"""Loss weight of a token of the question, of the thought, after a thought, of an answer without a thought, and of a
word of a thought that names a label: one token in a hundred, and the only one to learn from where labels are."""

THOUGHT, AFTER, DIRECT, NAMING = 1, 2, 3, 4

DRILL_SHARE = 0.1
"""Share of the texts that practise naming labels."""

FREQUENCY = {"kth": 0.6, "sums": 0.6, "rating": 0.5, "reach": 0.8, "cups": 1.5, "hop": 1.5}
"""How often a task is drawn, against 1."""

ENDLESS_SHARE = 0.2
"""Share of the thoughts without end that are kept: they are long and all alike."""

MAIN = {"layers": 8, "width": 256, "inner": 640, "heads": 4, "kv_heads": 2}
DRAFT = {"layers": 2, "width": 128, "inner": 384, "heads": 2, "kv_heads": 1}


# --- texts to tokens --------------------------------------------------------------------------------------------------


def drawn(seed: int, n: int) -> Iterator[tuple[tasks.Case, bool]]:
    """Training cases, each with whether it is thought about."""
    rng = random.Random(seed)  # noqa: S311 - draws texts
    names = list(tasks.TASKS)
    sources = {name: tasks.cases(name, seed, training=True) for name in names}
    weights = [FREQUENCY.get(name, 1.0) for name in names]
    for name in rng.choices(names, weights, k=n):
        case = tasks.drill(rng) if rng.random() < DRILL_SHARE else next(sources[name])
        think = case.thought is not None and rng.random() < 0.5
        if think and not case.ends and rng.random() > ENDLESS_SHARE:
            think = False
        yield case, think


def make_tokenizer() -> Tokenizer:
    """Byte-level pairs over the tasks' texts; newlines, digits and labels stay apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (tasks.text(case, think=think) for case, think in drawn(999_999 + tasks.TRAIN_SEED, 8_000)), trainer
    )
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WHOLE])
    for word in (*WHOLE, " is", *"ABCDEFGHIJ0123456789"):
        if len(tokenizer.encode(word).ids) != 1:
            raise RuntimeError(f"{word!r} is not one token")
    return tokenizer


@dataclass(frozen=True)
class Rows:
    """Rows of one length, each of whole texts: tokens, and of each token the index of its weight in `WEIGHTS`."""

    ids: Tensor
    parts: Tensor


_TOKENIZER: Tokenizer | None = None


def _start_worker(serialised: str) -> None:
    global _TOKENIZER
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _TOKENIZER = Tokenizer.from_str(serialised)


def draw_rows(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Short and long rows of ``n`` texts drawn by ``seed``: arrays of shape (2, rows, length), tokens and parts."""
    seed, n = job
    assert _TOKENIZER is not None
    chosen = list(drawn(seed, n))
    coded = _TOKENIZER.encode_batch([tasks.text(case, think=think) for case, think in chosen])
    texts = [_with_parts(one.ids[:LONG], think) for one, (_, think) in zip(coded, chosen, strict=True)]
    return (
        _packed([text for text in texts if text.shape[1] <= SHORT], SHORT),
        _packed([text for text in texts if text.shape[1] > SHORT], LONG),
    )


def _with_parts(ids: list[int], think: bool) -> np.ndarray:
    """Tokens and parts of one text, shape (2, T)."""
    assert _TOKENIZER is not None
    assistant, close = _TOKENIZER.token_to_id("<|im_start|>"), _TOKENIZER.token_to_id("</think>")
    text = np.zeros((2, len(ids)), dtype=np.int16)
    text[0] = ids
    if think:
        reply = len(ids) - ids[::-1].index(assistant)  # the role and a newline follow
        text[1, reply + 2 :] = THOUGHT
        if close in ids:
            end = ids.index(close)
            named = 1 + np.flatnonzero((text[0] == _TOKENIZER.token_to_id(IS)) & (text[1] == THOUGHT))
            text[1, named] = NAMING
            text[1, end + 1 :], text[1, end - 2] = AFTER, NAMING
    else:
        text[1, -3], text[1, -2:] = DIRECT, AFTER  # label; end of turn, newline
    return text


def _packed(texts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Texts one behind the other in rows, none of them split."""
    rows, used = [np.zeros((2, length), dtype=np.int16)], 0
    for text in texts:
        if used + text.shape[1] > length:
            rows.append(np.zeros((2, length), dtype=np.int16))
            used = 0
        rows[-1][:, used : used + text.shape[1]] = text
        used += text.shape[1]
    return np.stack(rows, axis=1)


def on_device(parts: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[Rows, Rows]:
    """Short and long rows of all jobs."""
    short, long = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    log.info(
        "%d short rows, %d long ones, %.0fM tokens",
        short.shape[1],
        long.shape[1],
        (short[0] > 0).sum() / 1e6 + (long[0] > 0).sum() / 1e6,
    )
    short, long = (torch.from_numpy(rows).to(device) for rows in (short, long))
    return Rows(short[0], short[1]), Rows(long[0], long[1])


def jobs(texts: int, first_seed: int) -> list[tuple[int, int]]:
    """Work for `draw_rows`: a seed and a number of texts each."""
    chunk = min(4000, texts)
    return [(tasks.TRAIN_SEED + first_seed + i, chunk) for i in range(texts // chunk)]


@contextmanager
def workers(tokenizer: Tokenizer) -> Iterator[Pool]:
    """Processes that draw and tokenise texts."""
    count = max(1, min(15, (os.cpu_count() or 1) - 1))
    with multiprocessing.get_context("fork").Pool(count, _start_worker, (tokenizer.to_str(),)) as pool:
        yield pool


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    network: Network,
    rows: tuple[Rows, Rows],
    *,
    seconds: float,
    batch: int,
    rate: float,
    compiled: bool = True,
    warm_up: int = 100,
) -> None:
    """Train for a number of seconds, those of compilation not counted; the rate falls as a cosine of the time.

    Parameters
    ----------
    network : Network
    rows : tuple of Rows
        Short and long ones; each step takes as many of the long ones as keeps both in proportion.
    seconds : float
    batch : int
        Short rows a step.
    rate : float
        Highest learning rate.
    compiled : bool
    warm_up : int
        Steps over which the rate rises.
    """
    network.train()
    device = next(network.parameters()).device
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05, fused=device.type == "cuda"
    )
    forward = torch.compile(network, dynamic=False) if compiled else network
    table = torch.tensor(WEIGHTS, device=device)
    short, long = rows
    sizes = (batch, max(1, round(batch * len(long.ids) / max(1, len(short.ids)))))
    begun, step, tokens, compile_seconds = time.perf_counter(), 0, 0, 0.0
    while True:
        if step == 3:
            compile_seconds = _now(device) - begun
        done = (time.perf_counter() - begun - compile_seconds) / seconds if step >= 3 else 0.0
        if done >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        losses, weights = [], []
        for part, size in zip((short, long), sizes, strict=True):
            if len(part.ids) == 0:
                continue
            chosen = torch.randint(0, len(part.ids), (size,), device=device)
            ids = part.ids[chosen].long()
            with torch.autocast(device.type, torch.bfloat16):
                logits = forward(ids[:, :-1])
            weight = table[part.parts[chosen][:, 1:].long()].flatten()
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
            losses.append((loss * weight).sum())
            weights.append(weight.sum())
            tokens += ids.numel()
        loss = torch.stack(losses).sum() / torch.stack(weights).sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 250 == 0:
            log.info("step %d, loss %.4f, %.2fM tokens/s, %.0f %%", step, loss.item(),
                     tokens / (time.perf_counter() - begun) / 1e6, 100 * done)  # fmt: skip
    parameters = sum(parameter.numel() for parameter in network.parameters())
    log.info(
        "%.2fM parameters, %.0fM tokens, %d steps of %s rows, %.0f s, of which %.0f s compilation",
        parameters / 1e6, tokens / 1e6, step, sizes, _now(device) - begun, compile_seconds,
    )  # fmt: skip
    network.eval()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def appraise(network: Network, tokenizer: Tokenizer, n: int) -> None:
    """Log, for each task, what System 1 gets right on held-out texts and how often a whole thought would be written.

    The thought is not generated: it is right when each of its tokens is the likeliest after those before it.
    """
    device = next(network.parameters()).device
    labels = {w: tokenizer.token_to_id(w) for w in (*"ABCDEFGHIJ012345", "yes", "no")}
    for name in tasks.TASKS:
        source = tasks.cases(name, tasks.QUESTION_SEED + 999_999, training=False)
        chosen = [next(source) for _ in range(n)]
        right, confidence, whole, lengths = [], [], [], []
        for case in chosen:
            ids = torch.tensor([tokenizer.encode(tasks.prompt(case, think=False)).ids], device=device)
            options = {"choice": "ABCDEFGHIJ"[: len(case.options)], "noul": ("no", "yes"), "score": "012345"}[case.kind]
            with torch.autocast(device.type, torch.bfloat16):
                logits = network(ids)[0, -1].float()
            p = logits[[labels[option] for option in options]].softmax(-1)
            right.append(int(p.argmax()) == case.answer)
            confidence.append(float(p.max()))
            if case.thought is None or not case.ends:
                continue
            opened, told = tasks.prompt(case, think=True), tasks.text(case, think=True)
            ids = torch.tensor([tokenizer.encode(told).ids[:LONG]], device=device)
            start = len(tokenizer.encode(opened).ids)
            with torch.autocast(device.type, torch.bfloat16):
                guessed = network(ids[:, :-1]).argmax(-1)[0]
            agrees = guessed[start - 1 : -2] == ids[0, start:-2]
            whole.append(bool(agrees[:-1].all()) if case.dataset == "rating" else bool(agrees.all()))
            lengths.append(ids.shape[1] - start)
        log.info(
            "%-9s System 1 %.3f, confidence %.3f; whole thoughts %.3f, tokens median %.0f, most %.0f",
            name, np.mean(right), np.mean(confidence), np.mean(whole) if whole else math.nan,
            np.median(lengths) if lengths else 0, max(lengths, default=0),
        )  # fmt: skip


def save_all(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model with its tokeniser and chat template."""
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    save(network, folder, end=end, pad=pad)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ENDS)
    fast.model_max_length = network.shape.context
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for main/ and draft/")
    parser.add_argument("--seconds", type=float, default=380, help="of training the main model")
    parser.add_argument("--draft-seconds", type=float, default=25)
    parser.add_argument("--texts", type=int, default=3_000_000)
    parser.add_argument("--batch", type=int, default=256, help="rows of 512 tokens a step")
    parser.add_argument("--appraise", type=int, default=60, help="held-out cases a task")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = make_tokenizer()
    log.info("%d tokens in the vocabulary", tokenizer.get_vocab_size())
    vocabulary = math.ceil(tokenizer.get_vocab_size() / 64) * 64
    first = max(1, given.texts // 3)
    with workers(tokenizer) as pool:
        drawn_first = pool.map(draw_rows, jobs(first, 0), chunksize=1)
        later = pool.map_async(draw_rows, jobs(given.texts - first, 100_000), chunksize=1)
        # the draft model needs no more than the first third; the others are drawn meanwhile
        for name, sizes, seconds in (("draft", DRAFT, given.draft_seconds), ("main", MAIN, given.seconds)):
            rows = on_device(drawn_first if name == "draft" else [*drawn_first, *later.get()], device)
            network = Network(Shape(vocabulary=vocabulary, **sizes)).to(device)
            train(network, rows, seconds=seconds, batch=given.batch, rate=1.5e-3, compiled=device.type == "cuda")
            save_all(network, tokenizer, given.out / name)
            log.info("wrote %s", given.out / name)
    appraise(network, tokenizer, given.appraise)


if __name__ == "__main__":
    main()
