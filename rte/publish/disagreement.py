"""Whether the two rules for the pods' fingerprint differ on a node. Pure.

One rule knows phase and requests of each pod and says what the scheduler says; the other knows only
what PodResources lists, and is all there is where pods may not be watched. Where they differ, a
publisher without the watch would keep the scheduler waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rte.model import Observation
from rte.publish.fingerprint import InformerMode
from rte.publish.nrt import FingerprintMethod, common_method, fingerprinted_pods


def rules_disagree(
    observation: Observation,
    body: Mapping[str, Any],
    *,
    mode: InformerMode,
    method: FingerprintMethod,
) -> bool | None:
    """Whether both rules count the same pods for this body; None where only one can be used."""
    if observation.pods is None:
        return None
    resources = frozenset(
        resource["name"] for zone in body["zones"] for resource in zone.get("resources", ())
    )
    method = common_method(observation, resources=resources, mode=mode, wanted=method)
    both = (
        fingerprinted_pods(seen, resources=resources, mode=mode, method=method)
        for seen in (observation, replace(observation, pods=None))
    )
    by_requests, by_usage = map(sorted, both)
    return by_requests != by_usage
