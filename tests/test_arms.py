"""arms.toml: what is read, what is refused and how that is said, secrets, and the examples."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib import arms as module
from calib.arms import EXAMPLES, Arm, arm_of, example, read_arms, write_example
from calib.environment import Environment, flags, is_issued, is_secret, resolve
from calib.errors import CalibError

STARTED = 'url = "http://127.0.0.1:8000"\nstart = ["bash", "serve.sh"]\n'


def read(tmp_path: Path, text: str) -> tuple[Arm, ...]:
    path = tmp_path / "arms.toml"
    path.write_text(text, encoding="utf-8")
    return read_arms(path)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(CalibError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "arms.toml") in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_running_server_has_defaults(tmp_path: Path) -> None:
    (arm,) = read(tmp_path, '[arms.base]\nurl = "http://127.0.0.1:8000/v1/"\n')
    assert arm == Arm("base", ("http://127.0.0.1:8000",), folder=tmp_path)
    assert (arm.engine, arm.start, arm.env, arm.ready_seconds, arm.concurrency) == ("auto", None, {}, 1200, None)
    assert arm.origin == f"{tmp_path / 'arms.toml'}: [arms.base]"


def test_every_field_is_read(tmp_path: Path) -> None:
    (arm,) = read(
        tmp_path,
        """
        [arms.mtp]
        urls = ["http://gpu1:8000/v1/decide", "https://gpu2.example/path"]
        engine = "decide"
        start = ["bash", "serve.sh"]
        env = { MTP = "1", MAX_MODEL_LEN = 32768, WHERE = "$HOME/x" }
        env_from = ["HF_TOKEN"]
        folder = "GEV"
        ready_seconds = 60
        stop_seconds = 0
        log = "logs/mtp.log"
        gpu_free_gib = 70.5
        concurrency = 8
        api_key_env = "SERVER_KEY"
        """,
    )
    assert arm == Arm(
        name="mtp",
        urls=("http://gpu1:8000", "https://gpu2.example/path"),
        engine="decide",
        start=("bash", "serve.sh"),
        env={"MTP": "1", "MAX_MODEL_LEN": "32768", "WHERE": "$HOME/x"},
        env_from=("HF_TOKEN",),
        folder=tmp_path / "GEV",
        ready_seconds=60.0,
        stop_seconds=0.0,
        log=tmp_path / "logs/mtp.log",
        gpu_free_gib=70.5,
        concurrency=8,
        api_key_env="SERVER_KEY",
    )
    assert arm.to_dict()["env"] == {"MTP": "1", "MAX_MODEL_LEN": "32768", "WHERE": "$HOME/x"}


def test_arms_keep_the_order_of_the_file_and_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    text = "\ufeff" + "".join(f'[arms.{name}]\nurl = "http://127.0.0.1:80{n:02}"\n' for n, name in enumerate("zab"))
    assert [arm.name for arm in read(tmp_path, text)] == ["z", "a", "b"]


def test_two_started_arms_may_share_an_address_and_running_ones_may_not(tmp_path: Path) -> None:
    assert len(read(tmp_path, f"[arms.base]\n{STARTED}[arms.mtp]\n{STARTED}")) == 2
    text = '[arms.base]\nurl = "http://127.0.0.1:8000"\n[arms.mtp]\nurl = "http://127.0.0.1:8000/"\n'
    message = refused(tmp_path, text)
    assert "'base' and 'mtp' both name http://127.0.0.1:8000" in message


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(CalibError, match=r"no file .*arms\.toml; calib init"):
        read_arms(tmp_path / "arms.toml")
    with pytest.raises(CalibError, match="cannot be read"):
        read_arms(tmp_path)


def test_other_bytes_than_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "arms.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(CalibError, match="byte 5 is not UTF-8"):
        read_arms(tmp_path / "arms.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"there is no arm; write one as"),
        ("[arms]\n", r"there is no arm; write one as"),
        ("arms = 3\n", r"there is no arm; write one as"),
        ('url = "http://a:1"\n', r"url stands outside of an arm; write it below a line \[arms\.NAME\]"),
        ('[base]\nurl = "http://a:1"\n', r"unknown table \[base\]; an arm's table is called \[arms\.base\]"),
        ("[other]\nx = 1\n", r"unknown table 'other'; expected only \[arms\.NAME\]"),
        ("x = 1\n", r"unknown field 'x'"),
        ('[arms]\nbase = "http://a:1"\n', r"arms\.base should be a table"),
        ('[arms."a b"]\nurl = "http://a:1"\n', r"'a b' is no name for an arm"),
        ('[arms."../x"]\nurl = "http://a:1"\n', r"'\.\./x' is no name for an arm"),
        ("[arms.base]\nurl = http://a:1\n", r"is not TOML: .*line 2.*quotes"),
        ("[arms.base]\n", r"\[arms\.base\]: give either url or urls"),
        ('[arms.base]\nurl = "http://a:1"\nurls = ["http://b:1"]\n', r"give either url or urls, one of both"),
        ("[arms.base]\nurl = 8000\n", r"url: expected a text; write for instance: url = \"http"),
        ('[arms.base]\nurl = "127.0.0.1:8000"\n', r"\[arms\.base\] url: .* is not the address of a server"),
        ("[arms.base]\nurls = []\n", r"urls: expected a list of texts"),
        ('[arms.base]\nurls = ["http://a:1", "http://a:1/"]\n', r"urls: http://a:1/? stands there twice"),
        ('[arms.base]\nur1 = "http://a:1"\n', r"unknown field 'ur1'; did you mean url\? Known: url, urls, engine"),
        ('[arms.base]\nurl = "http://a:1"\nready_second = 3\n', r"did you mean ready_seconds\?"),
        (
            '[arms.base]\nurl = "http://a:1"\nengine = "vlm"\n',
            r"'vlm' is not one of auto, decide, vllm; did you mean 'vllm'",
        ),
        ('[arms.base]\nurl = "http://a:1"\nengine = "gpt"\n', r"'gpt' is not one of auto, decide, vllm$"),
        ('[arms.base]\nurl = "http://a:1"\nconcurrency = 0\n', r"concurrency: expected a whole number, 1 or more"),
        ('[arms.base]\nurl = "http://a:1"\nconcurrency = true\n', r"concurrency: expected a whole number"),
        ('[arms.base]\nurl = "http://a:1"\nready_seconds = 60\n', r"ready_seconds: .*no start; add one"),
        (f"[arms.base]\n{STARTED}ready_seconds = 0\n", r"ready_seconds: expected a number above 0"),
        (f"[arms.base]\n{STARTED}ready_seconds = nan\n", r"ready_seconds: expected a number above 0"),
        (f"[arms.base]\n{STARTED}ready_seconds = {'9' * 400}\n", r"ready_seconds: expected a number above 0"),
        (f"[arms.base]\n{STARTED}stop_seconds = -1\n", r"stop_seconds: expected a number, 0 or more"),
        (f"[arms.base]\n{STARTED}env = [1]\n", r"env: expected a table"),
        (f"[arms.base]\n{STARTED}env = {{ MTP = true }}\n", r'env\.MTP: expected a text: env = \{ MTP = "1" \}'),
        (f"[arms.base]\n{STARTED}env = {{ 'A B' = '1' }}\n", r"env: entry 1 has no name for an environment variable"),
        (f"[arms.base]\n{STARTED}env = {{ A = '${{B' }}\n", r"env\.A: \$\{ names no variable"),
        (f"[arms.base]\n{STARTED}env = {{ A = '5$' }}\n", r"env\.A: \$ names no variable; .*\$\$ for a dollar"),
        (f"[arms.base]\n{STARTED}env_from = ['A=1']\n", r"env_from: entry 1 is no name"),
        (f"[arms.base]\n{STARTED}env_from = ['A']\nenv = {{ A = '1' }}\n", r"env_from: A stands in env too"),
        ('[arms.base]\nurl = "http://a:1"\nstart = []\n', r"start: expected a list of texts, not an empty one"),
        ('[arms.base]\nurl = "http://a:1"\nstart = [" "]\n', r"start: expected a program first"),
        (
            "[arms.base]\nurl = 'http://a:1'\nstart = \"vllm serve m --x '{\\\"a\\\": 1}'\"\n",
            r"""start = \["vllm", "serve", "m", "--x", '\{"a": 1\}'\]""",
        ),
        ("[arms.base]\nurl = 'http://a:1'\nstart = \"it's\"\n", r'start = \["bash", "serve\.sh"\]'),
        ("[arms.base]\nurl = 'http://a:1'\nstart = ['vllm', 'serve', '$MODEL']\n", r"\$MODEL would stay as it is"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_to_write(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, refused(tmp_path, text))


def test_a_suggested_list_is_what_the_text_meant(tmp_path: Path) -> None:
    command = 'vllm serve m --speculative-config \'{"method": "mtp"}\' --port 8000'
    message = refused(tmp_path, f"[arms.base]\nurl = 'http://a:1'\nstart = '''{command}'''\n")
    suggested = tomllib.loads(message[message.index("start = [") :])["start"]
    assert suggested == ["vllm", "serve", "m", "--speculative-config", '{"method": "mtp"}', "--port", "8000"]


@pytest.mark.parametrize(
    "fields",
    [
        'start = ["vllm", "serve", "m", "--port", "8001"]',
        'start = ["python3.11", "-m", "calib", "serve", "--port=8001"]',
        'start = ["bash", "serve.sh"]\nenv = { PORT = "8001" }',
    ],
)
def test_a_server_that_would_listen_elsewhere_is_refused(tmp_path: Path, fields: str) -> None:
    message = refused(tmp_path, f'[arms.base]\nurl = "http://127.0.0.1:8000"\n{fields}\n')
    assert "8001, and the address is http://127.0.0.1:8000" in message
    read(tmp_path, f'[arms.base]\nurl = "http://127.0.0.1:8001"\n{fields}\n')
    read(tmp_path, f'[arms.base]\nurl = "https://proxy.example"\n{fields}\n')  # which may map ports


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRET = "hunter2hunter2hunter2"


@pytest.mark.parametrize(
    "fields",
    [
        f'env = {{ HF_TOKEN = "{SECRET}" }}',
        f'env = {{ API_KEY = "{SECRET}" }}',
        f'env = {{ APIKEYS = "{SECRET}" }}',
        f'env = {{ PGPASSWORD = "{SECRET}" }}',
        f'env = {{ client_secret = "{SECRET}" }}',
        f'env = {{ HF_TOKEN = "Bearer $OTHER{SECRET}" }}',
        f'env = {{ PLAIN = "hf_{SECRET}" }}',
        f'env = {{ DATABASE = "postgresql://u:{SECRET}@host/db" }}',
        f'env = {{ "sk-{SECRET}" = "1" }}',
        f'env_from = ["hf_{SECRET}"]',
        f'api_key_env = "sk-{SECRET}"',
        f'api_key_env = "hf_{SECRET}"',
    ],
)
def test_a_secret_is_refused_and_not_repeated(tmp_path: Path, fields: str) -> None:
    message = refused(tmp_path, f"[arms.base]\n{STARTED}{fields}\n")
    assert "export" in message or "name" in message
    assert SECRET not in message


@pytest.mark.parametrize(
    "start",
    [
        f'["vllm", "serve", "m", "--api-key", "{SECRET}"]',
        f'["vllm", "serve", "m", "--api-key={SECRET}"]',
        f'["env", "HF_TOKEN={SECRET}", "vllm", "serve", "m"]',
        f'["bash", "-c", "export HF_TOKEN={SECRET}; exec vllm serve m"]',
        f'["vllm", "serve", "m", "--x", "hf_{SECRET}"]',
        f'"vllm serve m --api-key {SECRET}"',
    ],
)
def test_a_secret_among_the_arguments_is_refused_and_not_repeated(tmp_path: Path, start: str) -> None:
    message = refused(tmp_path, f'[arms.base]\nurl = "http://127.0.0.1:8000"\nstart = {start}\n')
    assert "start" in message
    assert SECRET not in message


@pytest.mark.parametrize("address", [f"http://me:{SECRET}@host:1", f"http://{SECRET}@host:1"])
def test_a_login_in_an_address_is_refused_in_a_file_and_not_repeated(tmp_path: Path, address: str) -> None:
    message = refused(tmp_path, f'[arms.base]\nurl = "{address}"\n')
    assert "a login does not belong in this file" in message
    assert "api_key_env" in message
    assert SECRET not in message


def test_what_only_looks_a_little_like_a_secret_is_accepted(tmp_path: Path) -> None:
    values = {
        "HF_TOKEN": "${OTHER}",
        "OPENAI_API_KEY": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN_PATH": "/home/me/token",
        "MAX_NUM_BATCHED_TOKENS": "8192",
        "NO_AUTH": "1",
        "MODEL": "company/task-specific-model-of-ours",
    }
    env = ", ".join(f'{name} = "{value}"' for name, value in values.items())
    start = '["vllm", "serve", "m", "--tokenizer", "t", "--max-num-batched-tokens", "8192", "--ssl-key-file", "k.pem"]'
    (arm,) = read(tmp_path, f'[arms.base]\nurl = "http://127.0.0.1:1"\nstart = {start}\nenv = {{ {env} }}\n')
    assert arm.env == values
    read(tmp_path, "[arms.base]\nurl = 'http://127.0.0.1:1'\nstart = ['bash', '-c', 'vllm serve m --api-key $KEY']\n")


def test_the_environment_is_resolved_only_when_asked_for(tmp_path: Path) -> None:
    (arm,) = read(
        tmp_path,
        f"[arms.base]\n{STARTED}"
        'env = { VLLM_API_KEY = "$SERVER_KEY", CACHE = "${HOME}/c", PRICE = "5$$", A = "$A$B" }\n'
        'env_from = ["HF_TOKEN"]\n',
    )
    assert SECRET not in repr(arm)
    around = {
        "SERVER_KEY": SECRET,
        "HF_TOKEN": "hf-" + SECRET,
        "OTHER_SECRET": "o" + SECRET,
        "CALIB_STORE": "postgresql://u:pw@host/db",
        "HOME": "/home/me",
        "A": "1",
        "B": "2",
    }
    environment = arm.environment(around)
    assert environment.values == {
        "HOME": "/home/me",
        "B": "2",
        "VLLM_API_KEY": SECRET,
        "CACHE": "/home/me/c",
        "PRICE": "5$",
        "A": "12",
        "HF_TOKEN": "hf-" + SECRET,
    }
    assert environment.withheld == ("CALIB_STORE", "OTHER_SECRET", "SERVER_KEY")
    assert environment.secrets == ("hf-" + SECRET, SECRET)  # the longest first, so that none is masked by halves
    assert environment.masked(f"key {SECRET} and hf-{SECRET}, at /home/me") == "key *** and ***, at /home/me"
    assert SECRET not in repr(environment)


@pytest.mark.parametrize(("env", "env_from", "place"), [({"X": "$GONE"}, (), "env.X"), ({}, ("GONE",), "env_from")])
def test_a_variable_that_is_not_set_is_named(env: dict[str, str], env_from: tuple[str, ...], place: str) -> None:
    arm = Arm("base", ("http://a:1",), start=("x",), env=env, env_from=env_from, origin="f: [arms.base]")
    with pytest.raises(CalibError, match=rf"f: \[arms\.base\] {place}: the variable GONE is not set; .*export GONE="):
        arm.environment({"HOME": "/"})


@given(st.text(st.characters(exclude_characters="\0"), max_size=20))
def test_any_text_survives_with_its_dollars_doubled(text: str) -> None:
    assert resolve({}, {"X": text.replace("$", "$$")}) == Environment({"X": text}, (), ())


def test_flags_of_a_command() -> None:
    command = ["vllm", "serve", "--port", "1", "--x=2", "-tp", "4", "--eager", "--y", "A=b", "c d=e"]
    assert flags(command) == [
        ("", "vllm"),
        ("", "serve"),
        ("--port", "1"),
        ("", "1"),
        ("--x", "2"),
        ("-tp", "4"),
        ("", "4"),
        ("", "--eager"),
        ("--y", "A=b"),
        ("A", "b"),
        ("", "c d=e"),
    ]


@pytest.mark.parametrize("name", ["TOKEN", "HF_TOKEN", "ApiKey", "x-api-key", "DB_PASSWD", "AUTH", "AWS_SECRET_ACCESS"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name, "value")
    assert not is_secret(name, "0")
    assert is_issued("ghp_abcdefghijklmnop1234")
    assert not is_issued("myhf_abcdefghijklmnop1234")


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_makes_the_same_arms(tmp_path: Path) -> None:
    arm = arm_of("base", "http://127.0.0.1:8000/v1")
    assert arm == Arm("base", ("http://127.0.0.1:8000",))
    assert arm_of("m", "http://a:1, http://b:1/").urls == ("http://a:1", "http://b:1")
    assert arm_of("m", "http://a:1", api_key_env="K").api_key_env == "K"


def test_a_login_on_the_command_line_is_used_and_not_shown() -> None:
    arm = arm_of("base", f"http://me:{SECRET}@127.0.0.1:8000")
    assert arm.urls == (f"http://me:{SECRET}@127.0.0.1:8000",)
    assert arm.shown_urls == ("http://127.0.0.1:8000",)
    assert SECRET not in repr(arm)
    assert SECRET not in str(arm.to_dict())


@pytest.mark.parametrize(
    ("name", "url", "said"),
    [
        ("a b", "http://a:1", "--arm: 'a b' is no name"),
        ("", "http://a:1", "--arm: '' is no name"),
        ("base", " , ", "--arm base: expected an address"),
        ("base", "a:1", "--arm base: .*not the address of a server"),
        ("base", "http://a:1,http://a:1/v1", "--arm base: http://a:1/? stands there twice"),
    ],
)
def test_an_arm_that_cannot_be_used_is_refused(name: str, url: str, said: str) -> None:
    with pytest.raises(CalibError, match=said):
        arm_of(name, url)


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_example_reads_and_is_commented(tmp_path: Path, kind: str) -> None:
    path = write_example(kind, tmp_path / "arms.toml")
    assert path.read_text("utf-8") == example(kind)
    found = read_arms(path)
    assert len(found) == 2
    assert found[0].name == "base"
    assert example(kind).count("#") >= 5
    assert len({arm.urls for arm in found}) == (2 if kind == "running" else 1)
    assert all((arm.start is None) == (kind == "running") for arm in found)


def test_the_examples_differ_between_arms_in_speculation_alone(tmp_path: Path) -> None:
    for kind, method in (("vllm-mtp", "mtp"), ("vllm-draft", "draft_model")):
        base, other = read_arms(write_example(kind, tmp_path / f"{kind}.toml"))
        assert base.start is not None
        assert other.start is not None
        assert other.start[: len(base.start)] == base.start
        flag, config = other.start[len(base.start) :]
        assert flag == "--speculative-config"
        assert f'"method": "{method}"' in config
        assert dict(flags(base.start))["--logprobs-mode"] == "processed_logprobs"
        assert dict(flags(base.start))["--max-logprobs"] == "256"
    base, mtp = read_arms(write_example("gev", tmp_path / "gev.toml"))
    assert (base.env["MTP"], mtp.env["MTP"]) == ("", "1")
    assert base.start == mtp.start == ("bash", "serve.sh")


def test_every_field_that_a_comment_shows_is_known() -> None:
    for kind in EXAMPLES:
        for name in re.findall(r"^# ([a-z_]+) = ", example(kind), re.MULTILINE):
            assert name in module._FIELDS


def test_an_example_is_not_written_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arms.toml"
    path.write_text("mine")
    with pytest.raises(CalibError, match=r"arms\.toml is there already; .*--force"):
        write_example("gev", path)
    assert path.read_text() == "mine"
    write_example("gev", path, force=True)
    assert path.read_text("utf-8") == example("gev")
    assert [entry.name for entry in tmp_path.iterdir()] == ["arms.toml"]
    with pytest.raises(CalibError, match="cannot be written"):
        write_example("gev", tmp_path / "no" / "arms.toml")


def test_an_unknown_example_is_refused() -> None:
    with pytest.raises(CalibError, match=r"no example 'vllm-mpt'; did you mean vllm-mtp\? There are: running, gev"):
        example("vllm-mpt")
