"""Initialization of an MoE model from a dense model. Each rank reads only the slices of the dense weights that its
parameters need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import OURS, kind_of
from megatron.core.dist_checkpointing.state_dict import MODEL, load_targets
from megatron.core.dist_checkpointing.storage import on_first_rank
from megatron.core.init import initialize_parameters_
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.conversion.convert import Input
from megatron.extensions.interop.conversion.formats import Options, Source, few
from megatron.extensions.moe.upcycling.flags import UpcyclingFlags
from megatron.training.config.flags import flags_of
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import changed_fields, training_only
from megatron.training.hooks import Callback
from megatron.training.progress import BegunRun, Progress

EXPERTS = ".mlp.experts."
ROUTER = ".mlp.router."
MULTI_TOKEN = "mtp."

Box = tuple[slice, ...]


class DenseStart(Callback):
    """Callback that starts a run from the dense model in --load. If --save contains checkpoints, the callback resumes
    the run from these checkpoints instead."""

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        config, state = begun.config, begun.state
        options = config.checkpoint
        save, load = options.save, options.load
        assert load is not None
        if save and not options.finetune and on_first_rank(lambda: kind_of(save) in OURS, state.world):
            return begun.resume_from(save, say, data, f" (--save), not the dense model in --load {load}")
        source = Input.at(located(load)).open(Options())
        check_fits(source, config, load)
        on_first_rank(source.check_data, state.world)
        weights = DenseWeights(source, config)
        with torch.no_grad(), begun.optimizer.loading_state() as pieces:
            targets = load_targets(begun.stages.values(), pieces, state, (), load_optimizer=False)
            for key, target in targets.items():
                for offset, box in target.boxes:
                    weights.fill(key.removeprefix(MODEL), offset, box)
        say(weights.described(load))
        return Progress(data_fingerprint=data(0), origin=asdict(source.origin))


def check_fits(source: Source, config: RunConfig, load: str) -> None:
    """Raise ValueError if the model in --load is not dense, or if it differs from the run's model in more than the
    experts."""
    dense = source.config.model
    if dense.num_experts is not None:
        rule = f"has {dense.num_experts} experts in a layer, but --moe-use-upcycling starts from a dense model"
        raise ValueError(f"--load {load} {rule}; remove --moe-use-upcycling to continue it")
    free = {flag.field for flag in flags_of("model") if flag.field.startswith(("moe_", "mtp_"))} | {*training_only()}
    free |= {"num_experts", "make_vocab_size_divisible_by", "pad_vocab_size_to"}
    if config.model.position_embedding_type != "learned_absolute":
        free |= {"seq_length", "max_position_embeddings"}
    if changed := changed_fields(source.config, config, (), free, ("in the dense model", "in the run")):
        raise ValueError(f"--load {load} does not fit the run: {few(changed, 8)}; use the values of the dense model")


class DenseWeights:
    """Weights of an MoE model, computed from the weights of a dense model.

    In the MoE model, the outputs of a token's k experts are multiplied by weights that sum to the scaling factor s. If
    each dense MLP is divided along its width into G parts, the k experts of a token include copies of every part. The
    weights of all copies of one part sum to s / G. To make the sum over experts equal to the output of the dense MLP,
    the linear_fc2 weight of each expert is multiplied by G / s, and the linear_fc2 bias by 1 / s.
    """

    def __init__(self, source: Source, config: RunConfig) -> None:
        own, self.model = config.options(UpcyclingFlags), config.model
        self.source, self.seed = source, config.training.seed
        self.parts, self.noise = own.moe_upcycling_granularity, own.moe_upcycling_noise
        scaling = config.model.moe_router_topk_scaling_factor or 1.0
        self.factors = {"linear_fc2.weight": self.parts / scaling, "linear_fc2.bias": 1 / scaling}
        self.metas = {meta.name: meta for meta in stage_metas(config.model)}
        self.left = set[str]()
        self._last: tuple[str, Tensor] | None = None

    def fill(self, name: str, offset: tuple[int, ...], box: Tensor) -> None:
        """Copy the weights of the dense model to the tensor `box`, which is the slice of parameter `name` that begins
        at index `offset`. Optimizer states, and parameters that only the MoE model has, keep their initial values.
        Raise ValueError if the dense model lacks a parameter that both models should have."""
        slices = tuple(slice(start, start + size) for start, size in zip(offset, box.shape, strict=True))
        if EXPERTS in name:
            self._fill_experts(name, slices, box)
        elif ROUTER in name:
            if self.parts > 1 and name in self.metas:
                box.copy_(self._router_of_parts(self.metas[name])[slices])
        elif name in self.source.metas:
            rows = min(slices[0].stop, self.source.metas[name].global_shape[0]) - slices[0].start
            # the remaining rows pad the vocabulary
            box[: max(rows, 0)].copy_(self._dense(name, box.dtype)[slices])
        elif name.startswith(MULTI_TOKEN):
            self.left.add(name)
        elif name in self.metas:
            raise ValueError(f"the dense model has no {name}")

    def _fill_experts(self, name: str, slices: Box, box: Tensor) -> None:
        """Copy the weights of a dense MLP to the experts of the same layer. If the MLP is divided along its width into
        G parts, expert e receives part e % G."""
        kind = name.partition(EXPERTS)[2]
        dense_name = name.replace(EXPERTS, ".mlp.")
        if name.startswith(MULTI_TOKEN) and dense_name not in self.source.metas:
            self.left.add(name)
            return
        dense = self._dense(dense_name, box.dtype)
        of_width = {"linear_fc1.weight": -2, "linear_fc1.bias": -1, "linear_fc2.weight": -1}.get(kind)
        for expert, own in zip(range(slices[0].start, slices[0].stop), box, strict=True):
            part = dense
            if of_width is not None:
                width = dense.shape[of_width] // self.parts
                part = dense.narrow(of_width, expert % self.parts * width, width)
            started = own * self.noise if self.noise else 0.0
            own.copy_(part[slices[1:]] * self.factors.get(kind, 1.0) + started)

    def _router_of_parts(self, meta: ParamMeta) -> Tensor:
        """Return the initial router weights for MLPs that are divided into several experts. Experts that together form
        one copy of the MLP have the same router weights."""
        whole = torch.empty(meta.global_shape)
        whole.meta = meta  # type: ignore[attr-defined]
        initialize_parameters_([whole], self.seed, ParallelState().coords)
        return whole[:: self.parts].repeat_interleave(self.parts, dim=0)

    def _dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a parameter of the dense model and convert it to `dtype`. The parameter that was read last is cached,
        because the slices of a parameter are filled one after another."""
        if self._last is None or self._last[0] != f"{name} {dtype}":
            self._last = f"{name} {dtype}", self.source.read(name, dtype)
        return self._last[1]

    def described(self, load: str) -> str:
        """Return the log line that describes the upcycled model and the initialization of experts and routers."""
        return " " + "; ".join([f"upcycled the dense model in --load {load}", *_facts(self.model, self)])


def _facts(model: TransformerConfig, weights: DenseWeights) -> Iterator[str]:
    parts = weights.parts
    share = "a copy of the MLP" if parts == 1 else f"1/{parts} of the width of the MLP"
    noise = f"plus {weights.noise:g} of its initial weights" if weights.noise else "without noise"
    yield f"each of {model.num_experts} experts is {share}, {noise}"
    alike = f", equal for the {parts} experts of one MLP" if parts > 1 else ""
    yield f"routers are initialized at random with --init-method-std {model.init_method_std:g}{alike}"
    if weights.left:
        yield "multi-token prediction modules are initialized at random"
    yield "starting at iteration 0 with a fresh optimizer"
