"""`vllm.yaml` of an export, read by vLLM's own argument parser: it understands what the arm was started with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from calib.arms import EXAMPLES, read_arms
from calib.export import export
from calib.policy import Policy
from calib.provenance import Provenance
from calib.resources import find

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


def understood(python: Path, *files: Path) -> list[dict]:
    """What vLLM takes from each file; importing vLLM takes 20 s, so all at once."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, HERE / "read_config.py", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(files) :]]


def exported(folder: Path, arm: str, start: tuple[str, ...] | None, **identity: str) -> Path:
    tuned = {"name": "best", "policy": Policy(arm=arm).to_dict()}
    export(tuned, folder, origin=Provenance({"engine": "vllm", **identity}, start))
    return folder / "vllm.yaml"


def test_the_arms_of_the_examples(vllm_python: Path, tmp_path: Path) -> None:
    arms = [arm for kind in ("vllm-mtp", "vllm-draft") for arm in read_arms(find(f"data/example/{EXAMPLES[kind]}"))]
    files = [exported(tmp_path / str(place), arm.name, arm.start) for place, arm in enumerate(arms)]
    for arm, found in zip(arms, understood(vllm_python, *files), strict=True):
        assert arm.start is not None
        speculation = [json.loads(word) for word in arm.start if word.startswith("{")]
        assert found["model"] == arm.start[2]
        assert (found["logprobs_mode"], found["max_logprobs"]) == ("processed_logprobs", 256)
        assert (found["max_model_len"], found["enable_prefix_caching"]) == (32768, True)
        assert found["reasoning_parser"] in ("qwen3", "gemma4")
        assert [found["speculative_config"]] == (speculation or [None])
        assert found["port"] == 8001  # where it listens is not in the file


def test_flags_of_every_form_and_names_that_need_quotes(vllm_python: Path, tmp_path: Path) -> None:
    name = 'it\'s "A": #1 é\u2028\U0001f600'
    start = (
        *("vllm", "serve", "org/m", "--served-model-name", name, "second", "-tp", "2", "--enforce_eager"),
        *("--no-enable-prefix-caching", "--max-logprobs", "-1", "--port=9", "--lora-modules", "a=b", "c=d"),
        *("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "4"),
    )
    (found,) = understood(vllm_python, exported(tmp_path, "ngram", start))
    assert found["served_model_name"] == [name, "second"]
    assert (found["tensor_parallel_size"], found["enforce_eager"], found["enable_prefix_caching"]) == (2, True, False)
    assert (found["max_logprobs"], found["port"]) == (-1, 8001)
    assert found["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 4}
    assert len(found["lora_modules"]) == 2


def test_an_arm_that_calib_did_not_start(vllm_python: Path, tmp_path: Path) -> None:
    file = exported(tmp_path, "mtp", None, root="org/m", model="served")
    (found,) = understood(vllm_python, file)
    assert (found["model"], found["served_model_name"]) == ("org/m", ["served"])
    assert (found["logprobs_mode"], found["max_logprobs"]) == ("processed_logprobs", 256)
    assert found["enable_prefix_caching"] is True
    assert found["speculative_config"] is None  # it is a comment, to be written by hand
