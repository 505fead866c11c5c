"""Entry points of the fp8 extension, which models call: fp8 GEMMs of linear layers and experts for each recipe, and a
check that the GPU supports them."""

from __future__ import annotations

import torch

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import Cuts, WeightCasts
from megatron.extensions.speed.fp8.blockwise import BlockwiseGemms
from megatron.extensions.speed.fp8.casts import BLOCK_CAPABILITY, BLOCK_CUDA, FIRST_CAPABILITY
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8.grouped import AddWeightGrad, Fp8GroupedGemms, has_grouped_fp8_kernel
from megatron.extensions.speed.fp8.recipes import DelayedGemms, Fp8Context, Fp8Gemms, RowwiseGemms, TensorwiseGemms
from megatron.extensions.speed.fp8.weight_gather import WeightGather, build_gather

RECIPES: dict[str, type[Fp8Gemms]] = {
    "tensorwise": TensorwiseGemms,
    "delayed": DelayedGemms,
    "rowwise": RowwiseGemms,
    "blockwise": BlockwiseGemms,
}


class Fp8Format(Fp8Context):
    """The fp8 format of linear layers, as registered in `LINEAR_FORMATS`."""

    @classmethod
    def build(cls, config: ModelParallelConfig, layers: range, casts: WeightCasts) -> Fp8Format:
        return cls(config.options(Fp8Flags), layers, casts)

    def linear(self, name: str, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> Fp8Gemms:
        """Return the GEMMs of a linear layer under the configured recipe.

        Args:
            name: Name of the layer.
            tp: Tensor-parallel axis.
            cuts: Dimensions of the layer that are sharded over `tp`.
            device: Device of the layer.
            compiled: Whether to compile the casts.
        """
        return RECIPES[self.config.fp8_recipe](name, self, tp, cuts, device, compiled)

    def grouped(
        self, expt_tp: Axis, cuts: Cuts, in_one_kernel: bool, compiled: bool, add_weight_grad_: AddWeightGrad
    ) -> Fp8GroupedGemms:
        return Fp8GroupedGemms(self, expt_tp, cuts, in_one_kernel, compiled, add_weight_grad_)

    def groups_in_one_kernel(self, device: torch.device) -> bool:
        return has_grouped_fp8_kernel(self.config.fp8_recipe, device)

    @staticmethod
    def gather(ddp: DistributedDataParallel) -> WeightGather | None:
        """Prepare the all-gather of weights in fp8 for --fp8-param-gather. Returns None if no bucket consists only of
        fp8 weights."""
        return build_gather(ddp)

    @staticmethod
    def check(config: ModelParallelConfig, device: torch.device) -> None:
        """Raise ValueError if the GPU does not support fp8 or the recipe."""
        own = config.options(Fp8Flags)
        if device.type != "cuda":
            return
        found = torch.cuda.get_device_capability(device)
        if own.fp8_recipe == "blockwise":
            cuda, name = torch.version.cuda or "0", torch.cuda.get_device_name(device)
            if found[0] != BLOCK_CAPABILITY or tuple(map(int, cuda.split("."))) < BLOCK_CUDA:
                raise ValueError(
                    f"--fp8-recipe blockwise needs a GPU of compute capability {BLOCK_CAPABILITY} (Hopper) and "
                    f"torch for CUDA {'{}.{}'.format(*BLOCK_CUDA)} or above, but {name} has "
                    f"{'{}.{}'.format(*found)} and torch has CUDA {cuda}: use --fp8-recipe tensorwise"
                )
        if found < FIRST_CAPABILITY:
            needed, has = ("{}.{}".format(*capability) for capability in (FIRST_CAPABILITY, found))
            raise ValueError(
                f"--fp8-format {own.fp8_format} needs a GPU of compute capability {needed} or above (Ada, "
                f"Hopper or newer), but {torch.cuda.get_device_name(device)} has {has}: remove it, or use another GPU"
            )
