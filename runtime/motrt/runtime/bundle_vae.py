"""The VAE of a bundle, if it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motrt.engines.errors import BundleError
from motrt.engines.vae_config import VaeConfig
from motrt.engines.vae_contract import vae_contracts
from motrt.runtime.vae import Vae

if TYPE_CHECKING:
    from motrt.engines.bundle import Bundle
    from motrt.runtime.protocols import Backend, Graph


def open_vae(bundle: Bundle, backend: Backend) -> Vae | None:
    """Return the bundle's VAE, its graphs opened when they are needed, or None."""
    component = bundle.manifest.components.get("vae")
    if component is None:
        return None
    config = VaeConfig.from_dict(component["config"])
    contracts, files = vae_contracts(config), component["graphs"]

    def open_engine(name: str) -> Graph:
        return backend.component(contracts[name], files[name])

    return Vae(config, open_engine)


def required_vae(vae: Vae | None, bundle: Bundle, refusal: str) -> Vae:
    """Return the VAE.

    Raises:
        BundleError: There is none, so ``refusal``.
    """
    if vae is None:
        raise BundleError(
            refusal,
            got=f"vae: {bundle.manifest.absent.get('vae', 'absent')}",
            fix="Export a checkpoint that has a vae/ folder.",
        )
    return vae
