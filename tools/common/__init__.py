"""Code shared by the tools: flags generated from configuration fields, checks of output paths, and exit codes."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, data_kind_of, refusal
from megatron.extensions import load
from megatron.training.config.flags import field_table, sections
from megatron.training.config.help import field_docs
from megatron.training.config.output_files import (
    drop_output,
    open_closed_streams,
    why_not_written,
    why_unwritable,
    why_unwritten,
)
from megatron.training.config.problem import checked_texts
from megatron.training.extensions import load_extensions
from megatron.training.reliability.launch import Launch, skip_final_collection
from megatron.training.reliability.visible_text import visible_output

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.extensions.use.inference.model import LoadedModel

Config = TypeVar("Config")

TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Configuration fields of the flags that determine how a model is sharded for generation."""


PICTURES = (".png", ".eps", ".jpg", ".pdf", ".svg", ".webp")
"""Picture formats that matplotlib writes."""


class ToolParser(argparse.ArgumentParser):
    """Argument parser whose error messages contain the reason, but not the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n--help lists the flags\n")


def tool_parser(about: str | None, **more: Any) -> argparse.ArgumentParser:
    """Return an argument parser whose help text begins with `about`, such as a module's docstring. The parser rejects
    values that are empty or contain control characters, except values of type `any_text`."""
    shape = argparse.RawDescriptionHelpFormatter
    return checked_texts(ToolParser(description=about, formatter_class=shape, **more))


def parted(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split the arguments into the tool's own arguments and the arguments after `--`, which belong to another
    program."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]


def too_small(args: argparse.Namespace, **least: float) -> list[str]:
    """Return an error message for each flag whose value is below its minimum."""
    given = {name: getattr(args, name) for name in least}
    return [
        f"--{name.replace('_', '-')} {value}: must be at least {least[name]}"
        for name, value in given.items()
        if value is not None and not value >= least[name]
    ]


def refuse(problems: Sequence[str]) -> None:
    """If there are problems, raise ValueError with one line for each problem."""
    if problems:
        raise ValueError("\n".join(problems))


def add_config_flags(parser: argparse.ArgumentParser, title: str, *names: str) -> None:
    """Add a flag for each configuration field in `names`. Flags have the same names, types and help texts as those of
    pretrain_gpt.py."""
    group = parser.add_argument_group(title)
    for name in names:
        flag = field_table()[name]
        cls = sections()[flag.section]
        text = field_docs(cls).get(name, "").replace("%", "%%")
        spellings = (flag.name, *flag.spec.aliases)
        if flag.kind is bool:
            group.add_argument(*spellings, dest=name, action="store_true", help=text)
            continue
        if flag.default is not None:
            text += f" (default: {flag.default})"
        group.add_argument(
            *spellings,
            dest=name,
            type=flag.kind,
            default=flag.default,
            choices=flag.spec.choices,
            nargs="+" if flag.spec.many else None,
            metavar=None if flag.spec.choices else flag.metavar,
            help=text,
        )


def model_parser(about: str | None, argv: Sequence[str] | None) -> argparse.ArgumentParser:
    """Return an argument parser for tools that generate text, with flags for extensions, the model, the device, the
    layout and the tokenizer."""
    from torch.cuda import is_available

    parser = tool_parser(about)
    add_extension_flag(parser, argv)
    add_family_flag(parser, argv)
    text = "checkpoint, folder of checkpoints, or Hugging Face folder"
    parser.add_argument("--load", type=located, required=True, help=text)
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja file to use instead of the tokenizer's template"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="texts generated at once (default: 8)")
    parser.add_argument("--device", default="cuda" if is_available() else "cpu", help="default: cuda, or cpu")
    add_config_flags(parser, "layout, over the ranks that torchrun or srun starts", *LAYOUT_FIELDS)
    add_config_flags(parser, "tokenizer, if its files have moved since training", *TOKENIZER_FIELDS)
    return parser


def model_flag_problems(args: argparse.Namespace) -> list[str]:
    """Return the problems with combinations of the flags of `model_parser`."""
    names = [name for name in TOKENIZER_FIELDS if name != "tokenizer_type" and getattr(args, name)]
    if not names or args.tokenizer_type:
        return []
    return [f"{', '.join('--' + name.replace('_', '-') for name in names)} needs --tokenizer-type beside it"]


def open_model(args: argparse.Namespace, launch: Launch, stack: ExitStack) -> LoadedModel:
    """Load the model that the flags of `model_parser` select. The model is released when `stack` is closed. If the
    model cannot be loaded, the first rank raises ValueError, and the other ranks exit with the exit code of this
    error."""
    from megatron.core.dist_checkpointing.storage import CheckpointError
    from megatron.extensions.use.inference.model import loaded_model

    tokenizer = config_of(TokenizerConfig, args) if args.tokenizer_type else None
    try:
        layout = config_of(ModelParallelConfig, args)
        return stack.enter_context(loaded_model(args.load, layout, args.device, launch, tokenizer))
    except (ValueError, CheckpointError) as error:
        if launch.rank == 0:
            raise ValueError(str(error)) from None
        sys.exit(2)


def add_extension_flag(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Add --extension, and import its files immediately, so that the components that they register can be used in other
    flags.

    If an extension cannot be loaded, the program prints a one-line error and exits with code 2."""
    text = "Python file, or package.module, that registers your own components; may be given more than once"
    _read_at_once(parser, argv, "--extension", "FILE.py", text, load_extensions)


def add_family_flag(parser: argparse.ArgumentParser, argv: Sequence[str] | None, writes: bool = False) -> None:
    """Add --hf-family if Hugging Face folders are supported. The files that --hf-family names are read immediately,
    like the files of --extension. If `writes` is true, the flag also accepts the name of a family, which
    `family_of_output` returns."""
    if "hugging_face" not in PATH_KINDS:
        return
    from megatron.extensions.interop.hugging_face.family_files import add_families, is_family_file

    def read(values: list[str]) -> None:
        if (names := [each for each in values if not is_family_file(each)]) and not writes:
            raise ValueError(
                f"{names[0]}: must be a file NAME.json, because this program does not write Hugging Face folders"
            )
        add_families(values)

    text = "file NAME.json that defines your own Hugging Face family; may be given more than once"
    if writes:
        text = "Hugging Face family to write (default: the input's, or the first that can represent it); or " + text
        older = {"dest": "hf_family", "action": "append", "default": [], "help": argparse.SUPPRESS}
        parser.add_argument("--model-type", **older)  # --hf-family was called --model-type in version 0.1.
    _read_at_once(parser, argv, "--hf-family", "NAME|FILE" if writes else "FILE", text, read)


def family_of_output(args: argparse.Namespace) -> str | None:
    """Return the Hugging Face family in which to write a model, as selected by --hf-family. Return None if the flag is
    not set. Raises ValueError for an unknown family."""
    if not (values := getattr(args, "hf_family", [])):
        return None
    from megatron.extensions.interop.hugging_face.family_files import add_families, family_to_write

    try:
        add_families(values)
        return family_to_write(values)
    except ValueError as error:
        raise ValueError(f"--hf-family: {error}") from None


def _read_at_once(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    flag: str,
    metavar: str,
    text: str,
    read: Callable[[list[str]], object],
) -> None:
    """Add a flag, and pass its values to `read` before any other flag is parsed."""
    first = checked_texts(ToolParser(add_help=False, allow_abbrev=False))
    for each in (parser, first):
        each.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    try:
        read(getattr(first.parse_known_args(argv)[0], flag[2:].replace("-", "_")))
    except ValueError as error:
        parser.error(f"{flag}: {error}")


def config_of(cls: type[Config], args: argparse.Namespace) -> Config:
    """Build a configuration section from parsed flags. Fields for which the parser has no flag keep their defaults."""
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if hasattr(args, field.name):
            value = getattr(args, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def why_unreachable(folder: PurePath) -> str | None:
    """Return the reason why no file can be written under a URL; None if a file can be written. The check leaves no
    files."""
    probe = folder / f".written-{os.urandom(16).hex()}"
    try:
        storage_of(folder).write(probe, b"")
        storage_of(folder).remove(probe)
    except OSError as error:
        return f"{folder} cannot be written: {error}"
    return None


def refuse_unwritable(flag: str, path: Path) -> None:
    """Raise ValueError if a file cannot be written. Call this function before any work is done."""
    if (why := why_not_written(path)) is not None:
        raise ValueError(f"{flag} {path}: {why}; name a file in a folder that can be written")


def refuse_output(paths: Sequence[PurePath], overwrite: bool) -> None:
    """Raise ValueError if files cannot be written to the folder or URL of the output, or if they exist and `overwrite`
    is false. Call this function before any work is done."""
    folder = paths[0].parent
    why = why_unwritable(folder) if isinstance(folder, Path) else why_unreachable(folder)
    if why:
        raise ValueError(f"--output-prefix: {why}; choose another prefix")
    present = [str(path) for path in paths if storage_of(path).exists(path)]
    if present and not overwrite:
        raise ValueError(
            f"--output-prefix: {', '.join(present)} {'is' if len(present) == 1 else 'are'} already there; "
            "choose another prefix, or replace with --overwrite"
        )


def dataset_at(prefix: str) -> IndexedDataset:
    """Open the indexed dataset `prefix`.bin and `prefix`.idx. Raises ValueError if the dataset does not exist, or if
    the path is a text file."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if data_kind_of(prefix) is not None:
        raise ValueError(refusal(prefix, "give the prefix of an indexed dataset"))
    return IndexedDataset(prefix)


def refuse_picture(flag: str, path: Path | None) -> None:
    """Raise ValueError if a picture cannot be written because of its suffix, its folder or missing matplotlib. Call
    this function before any work is done."""
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        example = path.with_suffix(PICTURES[0]) if path.suffix else f"{path}{PICTURES[0]}"
        raise ValueError(
            f"{flag} {path}: must end with the kind of picture: {', '.join(PICTURES)}; for example {example}"
        )
    refuse_unwritable(flag, path)
    if find_spec("matplotlib") is None:
        raise ValueError(f"{flag} {path}: needs matplotlib: pip install 'paritrain[plot]'")


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Run a tool's main and exit with its code. After a user error, print one line per problem and exit with code 2.
    The exit code is 130 after SIGINT and 143 after SIGTERM. Both signals raise an exception, so that temporary files
    are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    skip_final_collection()
    open_closed_streams()
    with visible_output():
        sys.exit(_exit_code(main))


def _exit_code(main: Callable[[], int]) -> int:
    load()
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        drop_output()
        return 141
    except ValueError as error:
        for line in str(error).split("\n"):
            print(f"error: {line}", file=sys.stderr)
        return 2
    except OSError as error:
        if (why := why_unwritten(error)) is not None:
            drop_output()
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"error: {why or named}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
