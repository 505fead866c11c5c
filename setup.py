"""Locations of the distribution's packages; pyproject.toml contains all other settings.

The library goes into `paritrain/_src`, which `import paritrain` puts on the path. A distribution that installs a
package `megatron` would replace files of megatron-core.
"""

from setuptools import find_packages, setup

INSIDE = "paritrain._src"

setup(
    packages=[
        "paritrain",
        *(f"{INSIDE}.{name}" for name in find_packages(include=["megatron", "megatron.*"])),
        *(f"{INSIDE}.megatron_tools{below}" for below in ("", ".common", ".pictures")),
    ],
    py_modules=[f"{INSIDE}.pretrain_gpt"],
    package_dir={INSIDE: ".", f"{INSIDE}.megatron_tools": "tools", "paritrain": "paritrain"},
    package_data={
        "": ["*.toml", "*.json", "*.yaml", "*.css", "*.html", "py.typed"],
        f"{INSIDE}.megatron.extensions": ["flag_index.txt"],
        f"{INSIDE}.megatron.extensions.interop.hugging_face": ["families/*.json"],
        f"{INSIDE}.megatron.extensions.interop.megatron_flags": ["flags_of_head.txt"],
        f"{INSIDE}.megatron.extensions.plan.planner": ["devices/*.yaml"],
    },
)
