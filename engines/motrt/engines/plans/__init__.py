"""Plans: TensorRT engines of a bundle's two graphs, built, audited, recorded and recognized.

``build_plans`` writes them; ``read_plan``, ``check_plan`` and ``read_engine`` are what a runtime
calls, in this order, before it gives a byte to TensorRT.
"""

from motrt.engines.plans.build import BuildResult, build_plans
from motrt.engines.plans.check import PlanHost, check_plan, read_engine, read_plan
from motrt.engines.plans.options import BuildOptions, BuildShapes, ClipSize
from motrt.engines.plans.record import EngineRecord, PlanRecord

__all__ = [
    "BuildOptions",
    "BuildResult",
    "BuildShapes",
    "ClipSize",
    "EngineRecord",
    "PlanHost",
    "PlanRecord",
    "build_plans",
    "check_plan",
    "read_engine",
    "read_plan",
]
