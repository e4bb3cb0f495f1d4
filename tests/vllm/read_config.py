"""Reads ``vllm serve --config FILE`` by vLLM's own parser and prints what it understood. Runs where vLLM is installed.

echo vllm.yaml | $CALIB_VLLM_VENV/bin/python tests/vllm/read_config.py

Files come on stdin, a line each, as importing vLLM takes many times as long as reading one.
"""

from __future__ import annotations

import json
import sys

NAMES = (
    *("model", "served_model_name", "logprobs_mode", "max_logprobs", "enable_prefix_caching", "speculative_config"),
    *("max_model_len", "reasoning_parser", "tensor_parallel_size", "enforce_eager", "lora_modules", "port"),
)


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=False, dest="subparser"))
    for line in sys.stdin:
        found = parser.parse_args(["serve", "--config", line.rstrip("\n"), "--port", "8001"])
        serve.validate(found)
        print(json.dumps({name: getattr(found, name) for name in NAMES}, default=repr), flush=True)


if __name__ == "__main__":
    main()
