"""`vllm.yaml`: what vLLM would read is what the arm was started with, whatever stands in it."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calib.arms import EXAMPLES, read_arms
from calib.resources import find
from calib.vllmyaml import NEEDED, read_start, speculates, vllm_yaml

START = (
    *("vllm", "serve", "Qwen/Qwen3-8B", "--port", "8000", "--host=0.0.0.0", "--reasoning-parser", "qwen3"),
    *("--max-model-len", "32768", "-tp", "2", "--enforce_eager", "--max-logprobs", "-1"),
    *("--lora-modules", "a=b", "c=d", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
)


def read(arm: str, start: tuple[str, ...] | None, **more) -> dict:
    return yaml.safe_load(vllm_yaml(arm, start, **more))


def test_the_flags_of_the_start_come_back_without_where_it_listens():
    assert read("mtp", START) == {
        "model": "Qwen/Qwen3-8B",
        "reasoning-parser": "qwen3",
        "max-model-len": "32768",
        "tensor-parallel-size": "2",
        "enforce-eager": True,
        "max-logprobs": "-1",
        "lora-modules": ["a=b", "c=d"],
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 1},
        "logprobs-mode": "processed_logprobs",
        "enable-prefix-caching": True,
    }


def test_what_the_start_says_is_not_set_again():
    text = vllm_yaml("base", ("vllm", "serve", "m", "--no-enable-prefix-caching", "--logprobs-mode", "raw_logprobs"))
    assert yaml.safe_load(text) == {
        "model": "m",
        "no-enable-prefix-caching": True,
        "logprobs-mode": "raw_logprobs",
        "max-logprobs": 256,
    }
    assert "started without" in text
    again = ("vllm", "serve", "m", "--enforce-eager", "--no-enforce-eager", "--enforce-eager")
    assert list(read("base", again))[:3] == ["model", "no-enforce-eager", "enforce-eager"]  # the last one counts


@pytest.mark.parametrize("start", [None, ("bash", "start.sh"), ("python", "serve.py", "--port", "1")])
def test_what_is_not_known_is_a_comment(start):
    text = vllm_yaml("mtp", start)
    assert yaml.safe_load(text) == dict(NEEDED)
    for unknown in ("# model: not known", "# speculative-config: not known", 'the arm "mtp"'):
        assert unknown in text
    assert read("a", start, root="org/m", served="m") == {"model": "org/m", "served-model-name": "m", **NEEDED}
    assert read("a", start, root="m", served="m") == dict(NEEDED)  # the name of a folder finds nothing
    assert speculates(start) is None


def test_the_api_server_module_is_vllm_too():
    start = ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/m", "--seed", "0")
    assert read("base", start) == {"model": "org/m", "seed": "0", **NEEDED}
    assert speculates((*start, "--speculative-config.method", "ngram"))
    assert not speculates(start)


def test_a_secret_and_a_value_that_reads_as_an_option_are_left_out():
    start = ("vllm", "serve", "m", "--hf-token", "hf_" + "x" * 30, "--override=-tp", "--download-dir", "http://u:p@h/")
    text = vllm_yaml("base", start)
    assert yaml.safe_load(text) == {"model": "m", **NEEDED}
    assert "xxx" not in text
    assert "u:p@" not in text
    assert "--hf-token, which looks like a secret" in text
    assert "--override, whose value would read as another option" in text


@pytest.mark.parametrize("kind", ["vllm-mtp", "vllm-draft"])
def test_every_example_arm_is_read_whole(kind):
    for arm in read_arms(find(f"data/example/{EXAMPLES[kind]}")):
        found = read(arm.name, arm.start)
        flags = {word[2:] for word in arm.start if word.startswith("--")} - {"port"}
        assert flags <= found.keys()
        assert isinstance(found.get("speculative-config", {}), dict)
        assert speculates(arm.start) == ("speculative-config" in found)


ODD = st.text(st.characters(codec="utf-8") | st.sampled_from("\n\r\t\x00\x85\u2028'\"\\:#{}[]&*!|>%@`$-"), max_size=12)


@given(ODD, ODD, ODD, st.dictionaries(ODD, ODD | st.integers() | st.floats(allow_nan=False, allow_infinity=False)))
def test_no_text_ends_its_quotes_or_begins_a_key(arm, model, value, nested):
    start = ("vllm", "serve", f"m{model}", f"--served-model-name={value}", "--hf-overrides", json.dumps(nested))
    text = vllm_yaml(arm, start)
    assert text.isascii()
    found = yaml.safe_load(text)
    told = read_start(start)
    assert found == {**told.values, **NEEDED}
    if told.left_out:
        assert any(word in told.left_out[0] for word in ("secret", "another option"))
    else:
        assert (found["model"], found["served-model-name"], found["hf-overrides"]) == (f"m{model}", value, nested)
    assert yaml.safe_load(vllm_yaml(arm, None, root=f"a/{model}", served=value))["model"] == f"a/{model}"
