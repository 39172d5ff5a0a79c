"""What a container was given when it started, and when that no longer does (`driver: injected`).

The NVIDIA runtime puts the driver's libraries and device nodes into a container once. Another
driver, or a GPU that appears later, reaches only a container that is made anew.
"""

from __future__ import annotations

from typing import Protocol

from rte.discovery.sysfs import Host
from rte.model import Machine, PciAddress

VERSIONS_DIFFER = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
# NVML says so for a moment while a driver is being installed: the second time it is meant.
MEANT = 2


class Asked(Protocol):
    """nvml_worker.NvmlWorker, as far as it tells how NVML fails."""

    @property
    def failures(self) -> int: ...
    @property
    def failure_code(self) -> int | None: ...


class Injection:
    """Told of each look; knows from the first what the container began with."""

    def __init__(self, *, patience_s: float = 3.0) -> None:
        """`patience_s` is how long a GPU that appeared may take to answer."""
        self.patience_s = patience_s
        self.wait_s: float | None = None  # until a look is due because of this; None: none is
        self.bound: frozenset[PciAddress] | None = None
        self.load: str | None = None
        self.silent_since: float | None = None

    def outgrown(
        self, host: Host, machine: Machine | None, asked: Asked, *, now_s: float
    ) -> str | None:
        """Why only a new container can go on, in words; None while this one does.

        `machine` is None where the look brought no reading of NVML.
        """
        bound = frozenset(d.address for d in host.pci if d.is_gpu and d.driver == "nvidia")
        if self.bound is None:
            self.bound, self.load = bound, host.driver_load
        self.wait_s = None
        if asked.failure_code == VERSIONS_DIFFER and asked.failures >= MEANT:
            return "the driver was replaced: NVML's library in this container is another version's"
        if host.driver_load is not None and host.driver_load != self.load:
            if self.load is not None:
                return "the driver was loaded anew since this container was made"
            if machine is None:
                return "the driver was loaded after this container was made"
        return self.appeared(bound - self.bound, machine, now_s)

    def appeared(
        self, fresh: frozenset[PciAddress], machine: Machine | None, now_s: float
    ) -> str | None:
        answering = {gpu.pci for gpu in machine.gpus if not gpu.lost} if machine else set()
        silent = sorted(fresh - answering)
        if not silent or machine is None:
            self.silent_since = None
            return None
        if self.silent_since is None:
            self.silent_since = now_s
        if now_s - self.silent_since < self.patience_s:
            self.wait_s = self.silent_since + self.patience_s - now_s
            return None
        return f"{', '.join(silent)}: added since this container was made, which cannot reach it"
