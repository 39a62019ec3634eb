"""Contract, manifest, weights store, bundles and backends. Nothing here imports torch."""

from motrt.engines.bundle import Bundle
from motrt.engines.checkpoint import Checkpoint, open_checkpoint
from motrt.engines.contract import (
    CONTRACT_VERSION,
    MASK_VALUE,
    Cache,
    EngineContract,
    Modality,
    generator_contract,
    reasoner_contract,
)
from motrt.engines.dtypes import DType, Precision
from motrt.engines.errors import (
    BuildError,
    BuildMemoryError,
    BundleError,
    CheckpointError,
    ConfigError,
    ContractError,
    ExecutionError,
    ExportError,
    ForeignPlanError,
    MissingDependencyError,
    MotrtError,
    ParityError,
    PlanError,
    RefitError,
    SchedulerError,
    StalePlanError,
)
from motrt.engines.manifest import Manifest
from motrt.engines.model_config import ModelConfig
from motrt.engines.onnxruntime_engine import OnnxRuntimeEngine
from motrt.engines.refit.disk import refit_bundle
from motrt.engines.refit.lora import Lora
from motrt.engines.refit.protocol import RefittableBackend, StagedEngines
from motrt.engines.refit.result import RefitResult
from motrt.engines.store import WeightEntry, WeightStore
from motrt.engines.tensors import TensorSpec

__all__ = [
    # Bundles and checkpoints
    "Bundle",
    "Checkpoint",
    "Manifest",
    "ModelConfig",
    "WeightEntry",
    "WeightStore",
    "open_checkpoint",
    # The contract
    "CONTRACT_VERSION",
    "MASK_VALUE",
    "Cache",
    "DType",
    "EngineContract",
    "Modality",
    "Precision",
    "TensorSpec",
    "generator_contract",
    "reasoner_contract",
    # New weights
    "Lora",
    "RefitResult",
    "RefittableBackend",
    "StagedEngines",
    "refit_bundle",
    # Backends
    "OnnxRuntimeEngine",
    # Errors
    "BuildError",
    "BuildMemoryError",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "ExecutionError",
    "ExportError",
    "ForeignPlanError",
    "MissingDependencyError",
    "MotrtError",
    "ParityError",
    "PlanError",
    "RefitError",
    "SchedulerError",
    "StalePlanError",
]
