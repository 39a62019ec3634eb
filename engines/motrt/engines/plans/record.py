"""``plan.json``: everything by which a plan is recognized, without a look into the plan.

What decides whether a plan fits is in ``identity``; its hash is the ``key``. The rest is
information: how it was built, and what the audit found.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motrt.engines.errors import PlanError
from motrt.engines.plans.profiles import Profile

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "motrt-plan"
SCHEMA = 1
PLAN_JSON = "plan.json"
ENGINES = ("reasoner", "generator")
_REBUILD = "Build the plan again with: motrt build"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine's file.

    Attributes:
        file: Its name in the plan's folder.
        nbytes: Size.
        sha256: Of its bytes.
    """

    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan of one target: both engines.

    Attributes:
        identity: What decides whether it fits; see :func:`identity_of` for the keys.
        engines: The files, by engine.
        info: How it was built and what was found in it.
    """

    identity: dict[str, Any]
    engines: dict[str, EngineRecord]
    info: dict[str, Any]

    @property
    def key(self) -> str:
        """Hash over ``identity``: equal keys are plans that may stand for each other."""
        return hashlib.sha256(_canonical(self.identity)).hexdigest()

    @property
    def weights_mode(self) -> str:
        """``refit`` or ``inputs``."""
        return str(self.identity["weights"]["mode"])

    def profiles(self, engine: str) -> tuple[Profile, ...]:
        """Return an engine's optimization profiles, in TensorRT's order."""
        return tuple(
            Profile(each["name"], {k: (v[0], v[1], v[2]) for k, v in each["dims"].items()})
            for each in self.identity["engines"][engine]["profiles"]
        )

    def aliases(self, engine: str) -> dict[str, str]:
        """Return output → input pairs that must be bound to one address."""
        return dict(self.identity["engines"][engine]["aliases"])

    def weight_names(self, engine: str) -> tuple[str, ...]:
        """Return the checkpoint names that a refit fills, or that are inputs."""
        return tuple(each[0] for each in self.identity["engines"][engine]["weights"])

    def to_json(self) -> str:
        """Return the file's text."""
        data = {
            "format": FORMAT,
            "schema": SCHEMA,
            "key": self.key,
            "identity": self.identity,
            "engines": {
                name: {"file": each.file, "bytes": each.nbytes, "sha256": each.sha256}
                for name, each in self.engines.items()
            },
            "info": self.info,
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, data: bytes) -> PlanRecord:
        """Read a ``plan.json``.

        Raises:
            PlanError: It is none, is from a newer motrt, or its key is not its identity's.
        """
        if len(data) > _MAX_BYTES:
            raise _unsound(f"{len(data)} bytes")
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise _unsound(f"no JSON ({err})") from err
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise _unsound("another file format")
        if tree.get("schema") != SCHEMA:
            raise PlanError(
                "the plan has another schema",
                got=repr(tree.get("schema")),
                expected=SCHEMA,
                fix=_REBUILD,
                fields=["schema"],
            )
        try:
            record = cls(
                identity=_object(tree["identity"]),
                engines={name: _engine(tree["engines"][name]) for name in ENGINES},
                info=_object(tree["info"]),
            )
            for name in ENGINES:
                record.profiles(name), record.aliases(name), record.weight_names(name)
            key = record.key
        except (KeyError, TypeError, ValueError, AttributeError, LookupError) as err:
            raise _unsound(f"{type(err).__name__}: {err}") from err
        if key != tree.get("key"):
            raise _unsound("a key that is not its identity's")
        return record


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r}")
    return value


def _engine(data: Mapping[str, Any]) -> EngineRecord:
    file, nbytes, digest = data["file"], data["bytes"], data["sha256"]
    if not isinstance(file, str) or "/" in file or "\\" in file or file.startswith("."):
        raise ValueError(f"a file outside the plan's folder: {file!r}")
    if type(nbytes) is not int or nbytes < 0 or not isinstance(digest, str):
        raise TypeError(f"a file without size or hash: {file!r}")
    return EngineRecord(file=file, nbytes=nbytes, sha256=digest)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _unsound(got: str) -> PlanError:
    return PlanError("plan.json is not sound", got=got, expected="a plan of motrt's", fix=_REBUILD)


def differing_fields(
    have: Mapping[str, Any], want: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return the paths at which two identities differ, such as ``engines.reasoner.profiles``."""
    found: list[str] = []
    for key in sorted({*have, *want}):
        mine, theirs, path = have.get(key), want.get(key), f"{prefix}{key}"
        if isinstance(mine, dict) and isinstance(theirs, dict):
            found += differing_fields(mine, theirs, f"{path}.")
        elif mine != theirs:
            found.append(path)
    return found
