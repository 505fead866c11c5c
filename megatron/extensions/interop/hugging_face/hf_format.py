"""Conversion source and target for Hugging Face folders.

`compare_logits` checks a conversion: it compares the fp32 logits of the transformers model with the fp32 logits of the
checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePath

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.multi_token import MULTI_TOKEN
from megatron.core.parallel_state import Axis
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.extensions.interop.conversion.formats import (
    GENERATION_CONFIG,
    Options,
    Origin,
    Source,
    Target,
    Written,
    tokenizer_config,
    tokenizer_files,
)
from megatron.extensions.interop.conversion.stored_input import local_model
from megatron.extensions.interop.conversion.streaming import made_ahead
from megatron.extensions.interop.hugging_face.buffers import buffers_of
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.flags import CONFIG
from megatron.extensions.interop.hugging_face.folder import SAFE_INDEX, HFFolder, index_of, plan_shards
from megatron.extensions.interop.hugging_face.read_config import config_from_hf, family_of, read_json, unread_keys
from megatron.extensions.interop.hugging_face.safetensors_file import SafetensorsWriter, TensorSpec
from megatron.extensions.interop.hugging_face.weights import (
    HFWeights,
    Placement,
    copies,
    multi_token_depths,
    placements,
)
from megatron.extensions.interop.hugging_face.write_config import choose_family, config_to_hf
from megatron.training.checkpoints.checkpointing import load_whole_model
from megatron.training.config.run_config import RunConfig


class HFSource(Source):
    """Conversion source that reads a Hugging Face folder. Names and shapes of all weights are checked before
    any weight is read."""

    def __init__(self, path: Path, options: Options) -> None:
        folder = HFFolder(path)
        model = config_from_hf(folder.config)
        model = replace(model, make_vocab_size_divisible_by=options.make_vocab_size_divisible_by)
        self.origin, model_type = origin_of(folder.config), str(folder.config["model_type"])
        self.notes = tuple(unread_keys(folder.config))
        depths = multi_token_depths(folder.tensors, model, model_type)
        model = replace(model, mtp_num_layers=depths or None)
        self.weights = HFWeights(folder.tensors, model, model_type)
        found = self.weights.placements
        self.metas = {name: each.meta for name, each in found.items() if each.state_dtype is None}
        self.states = [name for name, each in found.items() if each.state_dtype is not None]
        names = [*(file.name for file in tokenizer_files(path)), GENERATION_CONFIG]
        self.side_files = {name: path / name for name in names if (path / name).is_file()}
        mixed = [name for name in self.metas if len(self.weights.dtypes(name)) > 1]
        if mixed and options.dtype is None:
            raise ValueError(f"{path}: the tensors of {mixed[0]} differ in dtype; choose one with --dtype")
        counts = [self.dtype(name, options.dtype) for name in self.metas]
        common = max(set(counts), key=counts.count)
        self.config = RunConfig(
            model=model,
            parallel=ModelParallelConfig(
                fp16=common == torch.float16, bf16=common == torch.bfloat16, fp64=common == torch.float64
            ),
            tokenizer=tokenizer_config(path),
            extension_options=model.extension_options,
        )

    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        return wanted or next(iter(self.weights.dtypes(name)))

    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        return self.weights.read(name, dtype=wanted)

    def check_data(self) -> None:
        self.weights.check_copies()


WITHOUT_MODULES = "because they are not needed to generate one token at a time"


class HFTarget(Target):
    """Conversion target that writes a Hugging Face folder with config.json, sharded weights and tokenizer files."""

    def __init__(self, source: Source, output: Path, options: Options) -> None:
        self.source, self.options = source, options
        self.model: TransformerConfig = source.config.model
        model_type, other = _family_to_write(self.model, source.origin.model_type, options.family)
        self.config = config_to_hf(self.model, model_type)
        self.placements = [*placements(self.model, model_type), *copies(self.model, model_type)]
        specs = dict(self._specs())
        dtypes = [spec.dtype for spec in specs.values()]
        common = max(set(dtypes), key=dtypes.count)
        self.buffers = dict(buffers_of(self.model, model_type, common))
        specs |= {name: spec for name, (spec, _) in self.buffers.items()}
        self.shards = plan_shards(specs, options.max_shard_bytes)
        self.nbytes = sum(spec.nbytes for spec in specs.values())
        self.config["torch_dtype"] = str(common).removeprefix("torch.")
        tokens, problem = token_ids(source)
        self.config |= tokens
        self.notes = tuple(note for note in (other, problem) if note)
        if self.model.mtp_depths and not any(each.meta.name.startswith(MULTI_TOKEN) for each in self.placements):
            self.notes += (f"the modules of --mtp-num-layers {self.model.mtp_depths} are left out, {WITHOUT_MODULES}",)
        self.generation = {"_from_model_config": True, **tokens}

    def _specs(self) -> Iterator[tuple[str, TensorSpec]]:
        for placement in self.placements:
            dtype = self._dtype(placement)
            whole = TensorSpec(placement.meta.global_shape, dtype).meta()
            for name, tensor in zip(placement.theirs, placement.to_theirs(whole), strict=True):
                yield name, TensorSpec(tuple(tensor.shape), dtype)

    def _dtype(self, placement: Placement) -> torch.dtype:
        if placement.state_dtype is not None:
            return getattr(torch, placement.state_dtype)
        return self.source.dtype(placement.meta.name, self.options.dtype)

    def _converted(self, placement: Placement) -> tuple[Tensor, ...]:
        """Read the parameter or untrained buffer that `placement` describes, and convert it to Hugging Face tensors."""
        if placement.state_dtype is None:
            return placement.to_theirs(self.source.read(placement.meta.name, self.options.dtype))
        return placement.to_theirs(self.source.read_state(placement.meta, self._dtype(placement)))

    def write(self, folder: Path, world: Axis, written: Written) -> None:
        for file in list(self.shards)[world.rank :: world.size]:
            self._write_shard(folder / file, self.shards[file], written)

    def _write_shard(self, path: Path, specs: dict[str, TensorSpec], written: Written) -> None:
        with SafetensorsWriter(path, specs) as writer:
            wanted = [each for each in self.placements if not specs.keys().isdisjoint(each.theirs)]
            left, sums = Counter(name for each in wanted for name in each.theirs), dict[str, Tensor]()
            sizes = [sum(specs[name].nbytes for name in each.theirs if name in specs) for each in wanted]
            jobs = [(size, partial(self._converted, each)) for size, each in zip(sizes, wanted, strict=True)]
            for placement, tensors in zip(wanted, made_ahead(jobs), strict=True):
                for name, tensor in zip(placement.theirs, tensors, strict=True):
                    left[name] -= 1
                    if left[name]:
                        sums[name] = sums[name] + tensor if name in sums else tensor
                    elif name in specs:
                        writer.add(name, sums.pop(name) + tensor if name in sums else tensor)
                        written(specs[name].nbytes)
            for name in specs.keys() & self.buffers.keys():
                writer.add(name, self.buffers[name][1]())
                written(specs[name].nbytes)

    def finish(self, folder: Path) -> None:
        write_json(folder / CONFIG, self.config)
        write_json(folder / GENERATION_CONFIG, self.generation)
        if len(self.shards) > 1:
            write_json(folder / SAFE_INDEX, index_of(self.shards))
        for name, path in self.source.side_files.items():
            shutil.copyfile(path, folder / name)


def _family_to_write(config: TransformerConfig, origin: str | None, wanted: str | None) -> tuple[str, str | None]:
    """Return the family of an export, and a notice if this family differs from the model's origin. The requested family
    `wanted` takes precedence. Without a request, the family of the model's origin is selected, provided that it can
    still express the model. Otherwise, the first family that can express the model is selected.
    """
    if wanted is not None or origin is None:
        return wanted or choose_family(config), None
    try:
        if origin not in FAMILIES:
            raise ValueError("this family is unknown; add --hf-family FILE")
        config_to_hf(config, origin)
        placements(config, origin)
    except ValueError as error:
        chosen = choose_family(config)
        return chosen, f"written as {chosen} instead of {origin}, the family of the model's origin: {error}"
    return origin, None


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def origin_of(hf_config: Mapping[str, object]) -> Origin:
    """Return the `Origin` that checkpoints record for a model with this config.json. The `Origin` contains the family
    and the token ids."""
    return Origin(str(hf_config["model_type"]), stated_token_ids(hf_config))


def stated_token_ids(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Return the token ids in a config.json. If an id is missing, the default of the transformers class is used,
    provided that the default is an id in the vocabulary; otherwise, the id is None."""
    usual, tokens = family_of(hf_config).class_defaults, config_from_hf(hf_config).vocab_size or 0
    known = {key: value for key, value in usual.items() if type(value) is int and value < tokens}
    return {key: hf_config.get(key, known.get(key)) for key in TOKEN_IDS}


def token_ids(source: Source) -> tuple[dict[str, object], str | None]:
    """Return the ids of the tokens that begin, end and pad a text, keyed by their names in config.json. If the
    tokenizer cannot be read, also return a message for the user.

    The value of an unknown token id is None. Its key is not omitted, because transformers would use the default of its
    configuration class for a missing key, and this default may be a different token.
    """
    config, known = source.config, {key: source.origin.token_ids.get(key) for key in TOKEN_IDS}
    if config.tokenizer.tokenizer_type is None:
        return known, "the checkpoint names no tokenizer: no tokenizer files are written"
    if config.tokenizer.tokenizer_type == "NullTokenizer" and source.origin.token_ids:
        # A NullTokenizer has no information about the model's special tokens.
        return known, None
    try:
        tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
        pad = _pad_token_id(tokenizer, source.side_files)
    except (ValueError, OSError) as error:
        first = str(error).split("\n")[0]
        origin = "those of the model's origin" if any(known.values()) else "none"
        return known, f"the tokenizer cannot be read, and bos_token_id and eos_token_id are {origin}: {first}"
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": pad}, None


def _pad_token_id(tokenizer: Tokenizer, side_files: Mapping[str, Path]) -> int | None:
    """Return the padding token id in tokenizer_config.json. If this file specifies no padding token, return the id in
    generation_config.json."""
    settings, generation = (
        read_json(side_files[name]) if name in side_files else {}
        for name in ("tokenizer_config.json", GENERATION_CONFIG)
    )
    token = settings.get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None:
        return tokenizer.find(str(token))
    pad = generation.get("pad_token_id")
    return pad if isinstance(pad, int) else None


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class LogitDifference:
    """Result of comparing the logits of two models for the same text."""

    largest: float
    scale: float
    """Maximum absolute value of the logits."""

    tokens: int

    @property
    def equal(self) -> bool:
        """True if the difference is small enough to be caused by fp32 rounding."""
        return self.largest <= 0.01 * max(self.scale, 1e-3)

    def __str__(self) -> str:
        what = f"largest logit difference over {self.tokens} tokens"
        return f"{what}: {self.largest:.3g} (largest logit: {self.scale:.3g})"


def compare_logits(hf_folder: PurePath, checkpoint: PurePath, text: str) -> LogitDifference:
    """Compute the fp32 logits of a Hugging Face model and of a checkpoint on the CPU, and compare them for one text.
    Both models are in memory at the same time.

    Raises ValueError if transformers is not installed or the text has no tokens.
    """
    require_transformers()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    hf_folder = local_model(hf_folder)
    model, config = load_whole_model(checkpoint, number_format="fp32")
    tokens = _tokens(hf_folder, text, config.model.vocab_size or 0, config.model.max_positions)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        found = model.logits(None, Batch.of_tokens(tokens))[..., : expected.shape[-1]]
    return LogitDifference(float((found - expected).abs().max()), float(expected.abs().max()), tokens.numel())


def require_transformers() -> None:
    """Raise ValueError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise ValueError("--check needs the package transformers: pip install transformers")


def _tokens(folder: Path, text: str, vocab_size: int, longest: int) -> Tensor:
    """Return the token ids [1, s] of a text. If the folder has no tokenizer, each byte of the text is a token, and its
    id is the byte modulo `vocab_size`."""
    tokenizer = tokenizer_config(folder)
    if tokenizer.tokenizer_type is None:
        ids = [byte % vocab_size for byte in text.encode()]
    else:
        ids = build_tokenizer(tokenizer).tokenize(text)
    if not ids:
        raise ValueError("--check: the text has no tokens; give a longer one")
    return torch.tensor([ids[:longest]])
