"""What every command that looks at this node takes from the configuration."""

from __future__ import annotations

from pathlib import Path

from rte.config import Config
from rte.discovery import Overrides
from rte.discovery.nvml_worker import library_folders
from rte.model import NumaId, pci_address


def overrides(config: Config) -> Overrides:
    return Overrides(
        numa={pci_address(a): NumaId(n) for a, n in config.numa.overrides.items()},
        absent_links=tuple((pci_address(a), pci_address(b)) for a, b in config.nvlinks.absent),
        homes={pci_address(a): pci_address(b) for a, b in config.nics.homes.items()},
    )


def nvml_folders(config: Config) -> tuple[Path, ...]:
    """Where the worker's linker looks for NVML before its own places. A driver container may put
    it there after our start."""
    if config.nvml.library is not None:
        return (Path(config.nvml.library),)
    if config.driver == "mounted":
        return library_folders(Path(config.nvml.container_driver_root))
    return ()
