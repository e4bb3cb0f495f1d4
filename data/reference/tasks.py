"""Fourteen decision tasks with known answers, for a small model that answers at once or thinks first.

Each task is a function of a random generator that makes one `Case`: what is shown, the right answer, and the thought
that leads there. The text of a case is the one that stock vLLM's ``/v1/systemone`` makes of the same question. Answers
follow from the text, but for ``rating``, whose labels are noisy by design (`rating_ceiling` is the best that anyone can
do), and difficulty is graded by ``level``.

What the tasks are for:

========== ======= ==========================================================================================
chain      choice  arithmetic modulo ten: System 1 is weak, a finished thought is right
cups       choice  who holds what after many swaps
hop        choice  follow arrows, 5 to 10 options
count      choice  occurrences of a letter
product    choice  long multiplication among near misses
disorder   choice  pairs of a list that are out of order: thoughts of some hundred tokens
collatz    choice  steps of the 3n + 1 rule: thoughts from 10 to 1,500 tokens
kth        choice  k-th smallest number: easy for both systems
intent     choice  messages of customers: no thought was ever trained, so thinking hurts
parity     noul    is the number of ones odd: System 1 can only guess
sums       noul    which side is larger: easy for both systems
reach      noul    do the arrows ever lead there: where they do not, the thought walks in a circle and hits any budget
checks     score   how many of five checks pass
rating     score   satisfaction from words, with noisy labels
========== ======= ==========================================================================================

Train and question sets are apart twice: their seeds differ, and a text belongs to one side by its hash (`held_out`),
so that no question was ever trained on. `drill` is no task: it practises what the end of nearly every thought does,
to name the label of an option, on many options at once. Leaves to others: tokens and training (``train.py``), question
files (``write_questions.py``). Standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase

__all__ = [
    "HELD_OUT_SHARE",
    "QUESTION_SEED",
    "TASKS",
    "TRAIN_SEED",
    "Case",
    "cases",
    "drill",
    "held_out",
    "label",
    "prompt",
    "rating_ceiling",
    "text",
    "user_turn",
]

TRAIN_SEED, QUESTION_SEED = 1_000_000, 2_000_000
"""First seeds of the two sides; neither uses more than a million."""

HELD_OUT_SHARE = 1 / 16
"""Share of all texts that are kept for questions."""

LEVELS = ("0", "1", "2", "3", "4", "5")
NOUL = ("false", "true")
ENDLESS = 1900
"""Steps that are written of a thought that never ends; longer than any context that is trained on."""

OPENING, CLOSING = "<think>\n", "\n</think>\n\n"


@dataclass(frozen=True)
class Case:
    """One question with its answer and its thought.

    Attributes
    ----------
    dataset : str
        Name of the task.
    kind : {"choice", "noul", "score"}
    state, question : str
    options : tuple of str
        noul: ("false", "true"); score: "0" to "5".
    answer : int
        Index of the right option.
    thought : str or None
        None where thinking is not trained.
    level : int
        Difficulty within the task.
    ends : bool
        False for a thought that goes on for ever.
    """

    dataset: str
    kind: str
    state: str
    question: str
    options: tuple[str, ...]
    answer: int
    thought: str | None
    level: int
    ends: bool = True


def _choice(
    dataset: str, rng: random.Random, right: str, pool: Sequence[str], n: int, state: str, question: str, steps: str,
    level: int,
) -> Case:  # fmt: skip
    """A choice among ``right`` and n - 1 others of ``pool``; the thought ends by naming the letter."""
    wrong = [option for option in pool if option != right]
    options = [right, *rng.sample(wrong, min(n - 1, len(wrong)))]
    rng.shuffle(options)
    answer = options.index(right)
    thought = f"{steps} so {right} is {ascii_uppercase[answer]}"
    return Case(dataset, "choice", state, question, tuple(options), answer, thought, level)


def _noul(dataset: str, state: str, question: str, truth: bool, steps: str, level: int, *, ends: bool = True) -> Case:
    thought = f"{steps} so {'yes' if truth else 'no'}" if ends else steps
    return Case(dataset, "noul", state, question, NOUL, int(truth), thought, level, ends)


# --- choice -----------------------------------------------------------------------------------------------------------


def chain(rng: random.Random) -> Case:
    """One to sixteen operations modulo ten, 4 to 10 options."""
    n, value = rng.randint(1, 16), rng.randint(0, 9)
    told, steps = [f"Start with {value}."], str(value)
    for _ in range(n):
        sign, operand = rng.choice("+-*"), rng.randint(2, 9)
        told.append(f"{ {'+': 'Add', '-': 'Subtract', '*': 'Multiply by'}[sign] } {operand}.")
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[sign] % 10
        steps += f"{sign}{operand}={value}"
    question = "Keeping only the last digit after each step, what is the result?"
    digits = [str(digit) for digit in range(10)]
    return _choice("chain", rng, str(value), digits, rng.randint(4, 10), " ".join(told), question, steps, n)


_NAMES = ("Ann", "Bob", "Cy", "Dee", "Eve", "Fay")
_COLOURS = ("red", "blue", "green", "black", "white", "gold")


def cups(rng: random.Random) -> Case:
    """Three to six people swap what they hold up to twenty times."""
    people, swaps = rng.randint(3, 6), rng.randint(1, 20)
    who, held = _NAMES[:people], rng.sample(_COLOURS, people)
    told = [", ".join(f"{name} has {colour}" for name, colour in zip(who, held, strict=True)) + "."]
    steps = [" ".join(held)]
    for _ in range(swaps):
        i, j = rng.sample(range(people), 2)
        held[i], held[j] = held[j], held[i]
        told.append(f"{who[i]} swaps with {who[j]}.")
        steps.append(f"{who[i]} {who[j]}: {' '.join(held)}")
    asked = rng.randrange(people)
    steps.append(who[asked])
    question = f"What does {who[asked]} have?"
    return _choice("cups", rng, held[asked], held, people, " ".join(told), question, "; ".join(steps), swaps)


def _arrows(rng: random.Random, nodes: str) -> tuple[dict[str, str], str]:
    """One arrow out of each node, to another one, and the arrows told in random order."""
    to = {node: rng.choice(nodes.replace(node, "")) for node in nodes}
    order = rng.sample(nodes, len(nodes))
    return to, "Arrows: " + ", ".join(f"{node} to {to[node]}" for node in order) + "."


def hop(rng: random.Random) -> Case:
    """Follow up to thirty arrows among 5 to 10 nodes, each of which is an option."""
    nodes = ascii_lowercase[: rng.randint(5, 10)]
    to, told = _arrows(rng, nodes)
    hops, start = rng.randint(1, 30), rng.choice(nodes)
    at, steps = start, f"0{start}"
    for i in range(1, hops + 1):
        at = to[at]
        steps += f"{i}{at}"
    question = f"Start at {start} and follow {hops} arrows. Where do you end?"
    return _choice("hop", rng, at, nodes, len(nodes), told, question, steps, hops)


def count(rng: random.Random) -> Case:
    """Occurrences of one letter among up to fifty."""
    n, alphabet = rng.randint(6, 50), rng.sample(ascii_lowercase[:8], 4)
    letters, wanted = [rng.choice(alphabet) for _ in range(n)], alphabet[0]
    right = letters.count(wanted)
    seen, steps = 0, ""
    for letter in letters:
        seen += letter == wanted
        steps += f"{letter}{seen}"
    near = [str(i) for i in range(max(0, right - 4), right + 5)]
    question = f"How many times does {wanted} occur?"
    return _choice("count", rng, str(right), near, 5, f"Letters: {' '.join(letters)}.", question, steps, n)


def product(rng: random.Random) -> Case:
    """Two or three digits times two digits; the wrong options share the last two digits of the right one."""
    x, y = rng.randint(12, 999), rng.randint(12, 99)
    right = x * y
    near = [str(right + 100 * i) for i in range(-9, 10) if right + 100 * i > 0]

    def by_digit(digit: int) -> str:
        parts, carry = [], 0
        for figure in reversed(str(x)):
            total = int(figure) * digit + carry
            parts.append(f"{figure}*{digit}+{carry}={total}")
            carry = total // 10
        return ",".join(parts)

    tens, ones = divmod(y, 10)
    low, high = x * ones, x * tens * 10
    added, carry = [], 0
    for i in range(len(str(right))):
        a, b = (value // 10**i % 10 for value in (low, high))
        total = a + b + carry
        added.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    steps = f"{by_digit(ones)}={low};{by_digit(tens)}={high};{','.join(added)};{right}"
    return _choice(
        "product", rng, str(right), near, 4, f"Take {x} times {y}.", "What is the product?", steps, len(str(right))
    )


def disorder(rng: random.Random) -> Case:
    """Pairs of a list of 4 to 15 numbers that are out of order."""
    n = rng.randint(4, 15)
    numbers = rng.sample(range(10, 100), n)
    right, rows = 0, []
    for i, first in enumerate(numbers[:-1]):
        row = f"{first}:"
        for later in numbers[i + 1 :]:
            right += later < first
            row += f"{later}<{right}," if later < first else f"{later}>"
        rows.append(row.removesuffix(","))
    near = [str(i) for i in range(max(0, right - 6), right + 7)]
    question = "How many pairs are out of order, the larger number first?"
    state = f"Numbers: {' '.join(map(str, numbers))}."
    return _choice("disorder", rng, str(right), near, 6, state, question, ";".join(rows), n)


_LONGEST_THOUGHT = 1_500


def collatz(rng: random.Random) -> Case:
    """Steps of the 3n + 1 rule until 1, from a start of two to six digits: thoughts of up to 1,500 tokens.

    The thought writes numbers with the last digit first, so that each digit follows from what is written already.
    """
    while True:
        start = round(math.exp(rng.uniform(math.log(20), math.log(300_000))))
        path = [start]
        while path[-1] != 1:
            path.append(3 * path[-1] + 1 if path[-1] % 2 else path[-1] // 2)
        steps = ",".join(f"{str(number)[::-1]}:{i}" for i, number in enumerate(path))
        if len(steps) <= _LONGEST_THOUGHT:  # each character is a token
            break
    right = len(path) - 1
    near = [str(i) for i in range(max(0, right - 12), right + 13)]
    state = f"Begin with {start}. Halve an even number; triple an odd one and add 1."
    return _choice("collatz", rng, str(right), near, 6, state, "After how many steps is it 1?", steps, right)


def kth(rng: random.Random) -> Case:
    """The k-th smallest of 5 to 12 numbers."""
    n = rng.randint(5, 12)
    numbers, k = rng.sample(range(10, 100), n), rng.randint(1, n)
    ordered = sorted(numbers)
    steps = ",".join(f"{i}:{number}" for i, number in enumerate(ordered[:k], 1))
    state, question = f"Numbers: {' '.join(map(str, numbers))}.", f"Sorted from small to large, what is number {k}?"
    return _choice("kth", rng, str(ordered[k - 1]), list(map(str, numbers)), 5, state, question, steps, n)


_INTENTS = {
    "card lost": ("my card is gone", "i lost my card", "cannot find my card", "somebody took my card"),
    "card late": ("my card has not come", "still waiting for the card", "where is my new card", "no card in the mail"),
    "top up": ("add money to my account", "how do i top up", "load funds please", "put cash on the account"),
    "refund": ("i want my money back", "refund me", "return the payment", "the shop should pay me back"),
    "fee": ("why was i charged a fee", "extra charge on my bill", "what is this fee", "you took too much money"),
    "pin": ("change my pin", "i forgot the pin", "the pin does not work", "reset the pin code"),
    "rate": ("what is the exchange rate", "the rate looks wrong", "bad rate on my payment", "which rate do you use"),
    "close": ("close my account", "i want to leave", "delete my account", "stop all services"),
    "limit": ("raise my limit", "the limit is too low", "how much can i spend", "i cannot pay more than the limit"),
    "login": ("i cannot log in", "the app asks for a password", "my login is locked", "sign in does not work"),
}
_FILLERS = ("hello", "please", "thanks", "today", "again", "sorry", "right now", "at once", "good morning", "well")


def intent(rng: random.Random) -> Case:
    """Which of ten intents a message has; one in three also mentions another one, in any order."""
    right = rng.choice(list(_INTENTS))
    phrases = [rng.choice(_INTENTS[right])]
    if rng.random() < 0.35:
        phrases.append(rng.choice(_INTENTS[rng.choice(list(_INTENTS))]))
    for _ in range(rng.randint(0, 3)):
        phrases.insert(rng.randint(0, len(phrases)), rng.choice(_FILLERS))
    if rng.random() < 0.3:
        rng.shuffle(phrases)
    options = rng.sample(list(_INTENTS), len(_INTENTS))
    state = f"Message: {', '.join(phrases)}."
    return Case(
        "intent", "choice", state, "Which intent fits the message?", tuple(options), options.index(right), None,
        len(phrases),
    )  # fmt: skip


# --- noul -------------------------------------------------------------------------------------------------------------


def parity(rng: random.Random) -> Case:
    """Whether up to sixty bits hold an odd number of ones."""
    bits = [rng.randint(0, 1) for _ in range(rng.randint(3, 60))]
    odd, steps = 0, ""
    for bit in bits:
        odd ^= bit
        steps += f"{bit}{'eo'[odd]}"
    state = f"Bits: {' '.join(map(str, bits))}."
    return _noul("parity", state, "Is the number of ones odd?", bool(odd), steps, len(bits))


def sums(rng: random.Random) -> Case:
    """Which of two sums of up to five numbers is larger."""
    n = rng.randint(2, 5)
    sides = [[rng.randint(10, 99) for _ in range(n)] for _ in range(2)]

    def added(numbers: Sequence[int]) -> str:
        total, parts = 0, []
        for number in numbers:
            total += number
            parts.append(f"+{number}={total}")
        return "".join(parts)

    left, right = sides
    state = f"Left: {' '.join(map(str, left))}. Right: {' '.join(map(str, right))}."
    question = "Is the sum on the left larger than the sum on the right?"
    return _noul("sums", state, question, sum(left) > sum(right), f"left{added(left)} right{added(right)}", n)


def reach(rng: random.Random) -> Case:
    """Whether arrows among 6 to 16 nodes ever lead to a place; half do not, and then the thought never ends."""
    truth = rng.random() < 0.5
    while True:
        nodes = ascii_lowercase[: rng.randint(6, 16)]
        to, told = _arrows(rng, nodes)
        start = rng.choice(nodes)
        path = [start]
        while to[path[-1]] not in path:
            path.append(to[path[-1]])
        others = [node for node in nodes if node not in path]
        if len(path) > 1 and others:
            break
    question = "Starting at {} and following the arrows, do you ever come to {}?"
    if truth:
        steps = rng.randrange(1, len(path))
        walk = " ".join(path[: steps + 1])
        return _noul("reach", told, question.format(start, path[steps]), True, walk, steps)
    circle = path[path.index(to[path[-1]]) :]
    endless = [*path, *(circle * (ENDLESS // len(circle) + 1))][:ENDLESS]
    goal = rng.choice(others)
    return _noul("reach", told, question.format(start, goal), False, " ".join(endless), len(path), ends=False)


# --- score ------------------------------------------------------------------------------------------------------------


def checks(rng: random.Random) -> Case:
    """How many of five products stay within their limits."""
    names, passed, told, steps = rng.sample(("beam", "bolt", "cable", "deck", "plate", "truss", "weld"), 5), 0, [], []
    for name in names:
        pieces, load = rng.randint(3, 9), rng.randint(11, 99)
        total = pieces * load
        limit = round(total * rng.uniform(0.85, 1.15))
        passed += total <= limit
        told.append(f"{name} {pieces} times {load} of {limit}")
        steps.append(f"{pieces}*{load}={total}{'>' if total > limit else '<'}{limit} {passed}")
    state = "Loads: " + ", ".join(told) + "."
    question = "How many of the five loads are within their limits?"
    return Case("checks", "score", state, question, LEVELS, passed, ";".join(steps), passed)


_GOOD = ("great", "lovely", "superb", "nice", "happy")
_BAD = ("awful", "poor", "rude", "broken", "sad")
NOISE = 0.6
"""Standard deviation, in levels, of what the writer of a rating adds to the share of good words."""


def rating(rng: random.Random) -> Case:
    """A level from the share of good words, with noise."""
    lean, n = rng.random(), rng.randint(3, 9)
    words = [rng.choice(_GOOD if rng.random() < lean else _BAD) for _ in range(n)]
    good = sum(word in _GOOD for word in words)
    level = min(5, max(0, round(5 * good / n + rng.gauss(0, NOISE))))
    steps = "".join("+" if word in _GOOD else "-" for word in words)
    return Case(
        "rating", "score", f"Review: {' '.join(words)}.", "How satisfied is the writer?", LEVELS, level,
        f"{steps} so {good} of {n}", n,
    )  # fmt: skip


def rating_ceiling(state: str) -> float:
    """Probability of the likeliest level of a rating: the accuracy that nobody can pass, 0 to 1."""
    words = state.removeprefix("Review: ").rstrip(".").split()
    mean = 5 * sum(word in _GOOD for word in words) / len(words)
    below = [0.0, *(0.5 * (1 + math.erf((level + 0.5 - mean) / (NOISE * math.sqrt(2)))) for level in range(5)), 1.0]
    return max(high - low for low, high in pairwise(below))


TASKS: dict[str, Callable[[random.Random], Case]] = {
    task.__name__: task
    for task in (
        chain, cups, hop, count, product, disorder, collatz, kth, intent, parity, sums, reach, checks, rating,
    )
}  # fmt: skip


# --- practice ---------------------------------------------------------------------------------------------------------

_POOLS = (
    _COLOURS,
    _NAMES,
    tuple(ascii_lowercase[:10]),
    tuple(map(str, range(10))),
    tuple(map(str, range(60))),
    tuple(map(str, range(200, 40_000, 7))),
)
"""Words, letters and numbers as the tasks have them; not `_INTENTS`, about which no thought is trained."""


def drill(rng: random.Random) -> Case:
    """The labels of all options, in random order, up to the one that is asked for.

    A thought of a task names one label, in one token of a hundred; from that alone a small model learned to find
    options by their digits and never by their words.
    """
    pool = rng.choice(_POOLS)
    options = rng.sample(pool, rng.randint(3, min(10, len(pool))))
    order = rng.sample(options, len(options))
    answer = options.index(order[-1])
    thought = " ".join(f"so {option} is {ascii_uppercase[options.index(option)]}" for option in order)
    question = f"Which option is {order[-1]}?"
    return Case("drill", "choice", "Find the option.", question, tuple(options), answer, thought, len(options))


# --- two sides that share no text -------------------------------------------------------------------------------------


def held_out(case: Case) -> bool:
    """Whether a text is kept for questions: by a hash of its state, whatever is asked about it."""
    digest = blake2b(case.state.encode(), digest_size=8, person=b"reference").digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def cases(task: str, seed: int, *, training: bool) -> Iterator[Case]:
    """Cases of one task on one side, without end.

    Parameters
    ----------
    task : str
        Key of `TASKS`.
    seed : int
        From `TRAIN_SEED` or `QUESTION_SEED` on, up to a million more.
    training : bool
        Which side.

    Raises
    ------
    ValueError
        A seed of the other side.
    """
    first = TRAIN_SEED if training else QUESTION_SEED
    if not first <= seed < first + 1_000_000:
        raise ValueError(f"seed {seed} is not one of {first} to {first + 999_999}, which this side uses")
    rng = random.Random(f"{task}:{seed}")  # noqa: S311 - draws texts
    while True:
        case = TASKS[task](rng)
        if held_out(case) != training:
            yield case


# --- texts ------------------------------------------------------------------------------------------------------------


def user_turn(case: Case) -> str:
    """What the model is shown, as ``/v1/systemone`` words it."""
    if case.kind == "choice":
        lines = [f"{letter}: {option}" for letter, option in zip(ascii_uppercase, case.options, strict=False)]
        lines.append("Answer with the letter of one option only.")
    elif case.kind == "noul":
        lines = ["yes", "no", "Answer with yes or no only."]
    else:
        lines = [f"{level}: {level}" for level in case.options] + ["Answer with the number of one level only."]
    return "\n".join([case.state, "", f"Question: {case.question}", *lines])


def label(case: Case) -> str:
    """The one token that answers."""
    if case.kind == "choice":
        return ascii_uppercase[case.answer]
    return ("no", "yes")[case.answer] if case.kind == "noul" else case.options[case.answer]


def prompt(case: Case, *, think: bool) -> str:
    """The chat up to where the model goes on."""
    return f"<|im_start|>user\n{user_turn(case)}<|im_end|>\n<|im_start|>assistant\n{OPENING if think else ''}"


def text(case: Case, *, think: bool) -> str:
    """Prompt and what the model should say; a thought without end is not closed.

    Raises
    ------
    ValueError
        Thinking about a case that has no thought.
    """
    if not think:
        return f"{prompt(case, think=False)}{label(case)}<|im_end|>\n"
    if case.thought is None:
        raise ValueError(f"{case.dataset} has no thoughts")
    begun = prompt(case, think=True) + case.thought
    return f"{begun}{CLOSING}{label(case)}<|im_end|>\n" if case.ends else begun
