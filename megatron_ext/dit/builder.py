"""How `megatron.training` gets the model: a configuration and its builder."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.base import ModelBuilder, ModelConfig, compose_hooks
from megatron.training.models.dist_utils import unimodal_build_distributed_models

from megatron_ext.dit.config import geometry_of
from megatron_ext.dit.model import DiTModel
from megatron_ext.dit.tokens import Geometry


@dataclass
class DiTTransformerConfig(TransformerConfig):
    """Megatron's configuration of the layers, of a model whose stages all embed the condition."""

    has_cond_embedder: bool = True
    token_split: str = "contiguous"
    """How context-parallel ranks get their tokens (`tokens.share_of_rank`), for WallFacer's windows."""


@dataclass(kw_only=True)
class DiTModelConfig(ModelConfig):
    """What `DiTModelBuilder` builds."""

    builder: ClassVar[str] = "megatron_ext.dit.builder.DiTModelBuilder"
    transformer: TransformerConfig
    geometry: Geometry
    num_classes: int
    seed: int


def dit_config_from_args(args: Namespace) -> DiTModelConfig:
    """The model that the arguments describe."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    return DiTModelConfig(
        transformer=core_transformer_config_from_args(args, DiTTransformerConfig),
        geometry=geometry_of(args),
        num_classes=args.dit_num_classes,
        seed=args.seed,
    )


class DiTModelBuilder(ModelBuilder[DiTModel, DiTModelConfig]):
    """Builds the stages of this rank."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> DiTModel:
        """One stage; `pre_process` and `post_process`: whether it is the first or the last."""
        config = self._model_config
        return DiTModel(
            config.transformer,
            config.geometry,
            config.num_classes,
            config.seed,
            pg_collection,
            pre_process=bool(pre_process),
            post_process=bool(post_process),
            vp_stage=vp_stage,
        )

    def build_distributed_models(
        self,
        pg_collection: ProcessGroupCollection,
        ddp_config: DistributedDataParallelConfig | None = None,
        overlap_param_gather_with_optimizer_step: bool = False,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = False,
        mixed_precision_wrapper: Callable[[Any, MegatronModule], MegatronModule] | None = Float16Module,
        **kwargs: Any,
    ) -> list[DiTModel]:
        """All stages of this rank, wrapped for training."""
        config = self._model_config
        models = unimodal_build_distributed_models(
            self.build_model,
            config.transformer,
            pg_collection,
            ddp_config,
            overlap_param_gather_with_optimizer_step,
            use_megatron_fsdp,
            use_torch_fsdp2,
            wrap_with_ddp,
            data_parallel_random_init,
            mixed_precision_wrapper,
            compose_hooks(config.pre_wrap_hooks),
            **kwargs,
        )
        return compose_hooks(config.post_wrap_hooks)(models)
