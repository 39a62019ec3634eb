"""The public models' embodiments: which row of the action heads, and how wide an action is.

Source: diffusers ``pipelines/cosmos/pipeline_cosmos3_omni.py``, ``_EMBODIMENT_TO_DOMAIN_ID`` and
``_EMBODIMENT_TO_RAW_ACTION_DIM`` (None there where the width depends on the data set).
"""

from __future__ import annotations

from dataclasses import dataclass

from motrt.engines.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Embodiment:
    """Row of the tables and width of a raw action."""

    domain_id: int
    raw_action_dim: int | None


EMBODIMENTS = {
    "no_action": Embodiment(0, None),
    "av": Embodiment(1, 9),
    "camera_pose": Embodiment(2, 9),
    "hand_pose": Embodiment(3, 57),
    "pusht": Embodiment(4, 2),
    "libero": Embodiment(5, None),
    "umi": Embodiment(6, 10),
    "bridge_orig_lerobot": Embodiment(7, 10),
    "droid_lerobot": Embodiment(8, 10),
    "robomind-franka": Embodiment(8, 10),
    "galbot": Embodiment(9, 30),
    "robomind-franka-dual": Embodiment(12, 20),
    "robomind-ur": Embodiment(13, 10),
    "agibotworld": Embodiment(15, 29),
    "agibot_gear_gripper": Embodiment(15, 29),
    "agibot_gear_gripper_ext": Embodiment(15, 29),
    "fractal": Embodiment(20, 10),
}


def embodiment_named(name: str) -> Embodiment:
    """Return an embodiment.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in EMBODIMENTS:
        raise ConfigError(
            "unknown embodiment",
            got=name,
            expected=", ".join(EMBODIMENTS),
            fix="For one of your own give its number: domain_id and raw_action_dim, or --domain N.",
        )
    return EMBODIMENTS[name]
