"""`vllm.yaml` of an export, read by vLLM's own argument parser: it understands what the arm was started with."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from calib.arms import EXAMPLES, read_arms
from calib.export import export
from calib.policy import Policy
from calib.provenance import Provenance
from calib.resources import find

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


Parse = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def understood(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parse]:
    """What vLLM takes from a file. One process reads all of them, for it takes long to start."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("log") / "parser.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [vllm_python, HERE / "read_config.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        ) as parser,
    ):
        assert parser.stdin is not None
        assert parser.stdout is not None
        told, said = parser.stdin, parser.stdout

        def parse(file: Path) -> dict[str, Any]:
            told.write(f"{file}\n")
            told.flush()
            while not (line := said.readline()).startswith("{"):  # vLLM logs there, too
                assert line, log.read_text()[-3000:]
            found: dict[str, Any] = json.loads(line)
            return found

        yield parse


def exported(folder: Path, arm: str, start: tuple[str, ...] | None, **identity: str) -> Path:
    tuned = {"name": "best", "policy": Policy(arm=arm).to_dict()}
    export(tuned, folder, origin=Provenance({"engine": "vllm", **identity}, start))
    return folder / "vllm.yaml"


def test_the_arms_of_the_examples(understood: Parse, tmp_path: Path) -> None:
    arms = [arm for kind in ("vllm-mtp", "vllm-draft") for arm in read_arms(find(f"data/example/{EXAMPLES[kind]}"))]
    for place, arm in enumerate(arms):
        found = understood(exported(tmp_path / str(place), arm.name, arm.start))
        assert arm.start is not None
        speculation = [json.loads(word) for word in arm.start if word.startswith("{")]
        assert found["model"] == arm.start[2]
        assert (found["logprobs_mode"], found["max_logprobs"]) == ("processed_logprobs", 256)
        assert (found["max_model_len"], found["enable_prefix_caching"]) == (32768, True)
        assert found["reasoning_parser"] in ("qwen3", "gemma4")
        assert [found["speculative_config"]] == (speculation or [None])
        assert found["port"] == 8001  # where it listens is not in the file


def test_flags_of_every_form_and_names_that_need_quotes(understood: Parse, tmp_path: Path) -> None:
    name = 'it\'s "A": #1 é\u2028\U0001f600'
    start = (
        *("vllm", "serve", "org/m", "--served-model-name", name, "second", "-tp", "2", "--enforce_eager"),
        *("--no-enable-prefix-caching", "--max-logprobs", "-1", "--port=9", "--lora-modules", "a=b", "c=d"),
        *("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "4"),
    )
    found = understood(exported(tmp_path, "ngram", start))
    assert found["served_model_name"] == [name, "second"]
    assert (found["tensor_parallel_size"], found["enforce_eager"], found["enable_prefix_caching"]) == (2, True, False)
    assert (found["max_logprobs"], found["port"]) == (-1, 8001)
    assert found["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 4}
    assert len(found["lora_modules"]) == 2


def test_an_arm_that_calib_did_not_start(understood: Parse, tmp_path: Path) -> None:
    found = understood(exported(tmp_path, "mtp", None, root="org/m", model="served"))
    assert (found["model"], found["served_model_name"]) == ("org/m", ["served"])
    assert (found["logprobs_mode"], found["max_logprobs"]) == ("processed_logprobs", 256)
    assert found["enable_prefix_caching"] is True
    assert found["speculative_config"] is None  # it is a comment, to be written by hand
