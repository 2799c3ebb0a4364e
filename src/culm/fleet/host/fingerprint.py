"""Which workers are alike: a digest of all that was said to them when they were provisioned.

Pure. A worker takes an assignment of another child if both would have been provisioned alike.
So a part of the document counts unless it is named here; what is said with each run is not in it.
"""

import hashlib

import msgspec
from msgspec.structs import replace

from culm.fleet.provision import Provision

# Keys of objects are sorted: their order is nobody's intention.
_encoder = msgspec.json.Encoder(order="deterministic")


def fingerprint(provision: Provision) -> str:
    """The same for children that differ only in who they are, and in the order of tools.

    Secrets are part of it, so that a changed key is never served by a worker that has the old
    one; nothing of them can be read from it.
    """
    alike = replace(
        provision,
        identity=replace(provision.identity, child_id="", parent_id=None),
        owner=None,
        secrets=replace(provision.secrets, worker_auth_token=None),
        culm=replace(provision.culm, control_fd=None),
        disabled_tools=_sorted(provision.disabled_tools),
    )
    return hashlib.sha256(_encoder.encode(alike)).hexdigest()


def _sorted(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))
