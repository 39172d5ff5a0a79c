"""What every command that looks at this node takes from the configuration."""

from __future__ import annotations

from pathlib import Path

from rte.config import Config
from rte.discovery import Overrides
from rte.discovery.nvml_worker import NvmlWorker, library_folders
from rte.discovery.reading import NvmlReading
from rte.model import NumaId, pci_address


def overrides(config: Config) -> Overrides:
    return Overrides(
        numa={pci_address(a): NumaId(n) for a, n in config.numa.overrides.items()},
        absent_links=tuple((pci_address(a), pci_address(b)) for a, b in config.nvlinks.absent),
        homes={pci_address(a): pci_address(b) for a, b in config.nics.homes.items()},
    )


def nvml_worker(config: Config) -> NvmlWorker:
    """NVML's own process, started when it is first asked."""
    return NvmlWorker(library_folders=lambda: nvml_folders(config), answer_s=config.nvml.timeout)


def read_nvml(config: Config) -> NvmlReading:
    """What NVML says now, by a worker that ends with it. Raises NvmlUnavailable."""
    worker = nvml_worker(config)
    try:
        return worker.reading()
    finally:
        worker.stop()


def nvml_folders(config: Config) -> tuple[Path, ...]:
    """Where the worker's linker looks for NVML before its own places. A driver container may put
    it there after our start."""
    if config.nvml.library is not None:
        return (Path(config.nvml.library),)
    if config.driver == "mounted":
        return library_folders(Path(config.nvml.container_driver_root))
    return ()
