"""Llama 3 8B for TorchTitan 0.3.0's TorchFT experiment, which itself ships a debug model only.

TorchTitan finds it by ``--module sky_monarch.training.recipes.torchtitan_llama3 --config llama3_8b``, as
``task_templates/torchtitan-llama3.yaml`` has it; its own trainer does all the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

__all__ = ["llama3_8b"]


def llama3_8b() -> FaultTolerantTrainer.Config:
    """TorchTitan's own ``llama3_8b``, with the parts that know TorchFT in place of those that do not.

    Gradients are averaged in each step. Flags set the rest: the groups, the folders, the steps.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
    from torchtitan.experiments.torchft.config.job_config import FaultTolerance
    from torchtitan.experiments.torchft.llama3 import model_registry
    from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common.config_utils import decoder_vocab_size

    model = model_registry("8B")
    return FaultTolerantTrainer.Config(
        # The chunked loss of the original is bound to the model by a trainer that knows nothing of TorchFT.
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model)),
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model,
        optimizer=TorchFTOptimizersContainer.Config(param_groups=default_adamw(lr=3e-4).param_groups),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=TorchFTCheckpointManager.Config(interval=500),
        activation_checkpoint=SelectiveAC.Config(),
        fault_tolerance=FaultTolerance(enable=True, process_group="nccl"),
    )
