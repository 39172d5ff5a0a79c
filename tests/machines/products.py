"""What the products in the made machines answer: PCI ids, NVML's names, sizes and NVLinks.

Ids, names and sizes are what public logs of these products show; `lane_mbps` is NVML field 164,
which only drivers for Hopper and later answer.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProduct:
    """One GPU model."""

    device: int
    name: str
    memory_mib: int
    link: str  # PCIe: GT/s x lanes
    class_code: int = 0x030200
    nvlink_version: int | None = None  # NVML's number; None: no NVLink
    lane_mbps: int | None = None
    mig: bool = False
    mig_max: int | None = None
    fabric: bool = False  # whether the fabric call is known for it at all
    ecc: bool = True
    remap: bool = True  # row remapping, from Ampere on


GPUS = {
    "v100-sxm2-16": GpuProduct(
        device=0x1DB1,
        name="Tesla V100-SXM2-16GB",
        memory_mib=16160,
        link="8x16",
        nvlink_version=2,
        remap=False,
    ),
    "v100-sxm3-32": GpuProduct(
        device=0x1DB8,
        name="Tesla V100-SXM3-32GB",
        memory_mib=32510,
        link="8x16",
        nvlink_version=2,
        remap=False,
    ),
    "v100-power9": GpuProduct(
        device=0x1DB1,
        name="Tesla V100-SXM2-16GB",
        memory_mib=16128,
        link="8x16",
        class_code=0x030000,  # as the source's tree has it
        nvlink_version=2,
        remap=False,
    ),
    "a100-sxm4-40": GpuProduct(
        device=0x20B0,
        name="NVIDIA A100-SXM4-40GB",
        memory_mib=40960,
        link="16x16",
        nvlink_version=4,
        mig=True,
        mig_max=7,
    ),
    "a100-sxm4-80": GpuProduct(
        device=0x20B2,
        name="NVIDIA A100-SXM4-80GB",
        memory_mib=81920,
        link="16x16",
        nvlink_version=4,
        mig=True,
        mig_max=7,
    ),
    "a100-pcie-80": GpuProduct(
        device=0x20B5,
        name="NVIDIA A100 80GB PCIe",
        memory_mib=81920,
        link="16x16",
        nvlink_version=4,
        mig=True,
        mig_max=7,
    ),
    "l40": GpuProduct(device=0x26B5, name="NVIDIA L40", memory_mib=46068, link="16x16"),
    "l40s": GpuProduct(device=0x26B9, name="NVIDIA L40S", memory_mib=46068, link="16x16"),
    "h100-sxm": GpuProduct(
        device=0x2330,
        name="NVIDIA H100 80GB HBM3",
        memory_mib=81559,
        link="32x16",
        nvlink_version=6,
        lane_mbps=26562,
        mig=True,
        mig_max=7,
        fabric=True,
    ),
    "gh200": GpuProduct(
        device=0x2342,
        name="NVIDIA GH200 120GB",
        memory_mib=97871,
        link="32x16",
        nvlink_version=6,
        lane_mbps=26562,
        mig=True,
        mig_max=7,
        fabric=True,
    ),
    "gb200": GpuProduct(
        device=0x2941,
        name="NVIDIA GB200",
        memory_mib=189471,
        link="32x16",
        nvlink_version=7,
        lane_mbps=50000,
        mig=True,
        mig_max=7,
        fabric=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NicProduct:
    """One network function model."""

    vendor: int
    device: int
    link: str
    driver: str
    class_code: int = 0x020000


NICS = {
    "cx5": NicProduct(vendor=0x15B3, device=0x1019, link="16x16", driver="mlx5_core"),
    "cx4-ib": NicProduct(
        vendor=0x15B3, device=0x1013, link="8x16", driver="mlx5_core", class_code=0x020700
    ),
    "cx5-ib": NicProduct(
        vendor=0x15B3, device=0x1017, link="8x16", driver="mlx5_core", class_code=0x020700
    ),
    "cx6-ib": NicProduct(
        vendor=0x15B3, device=0x101B, link="16x16", driver="mlx5_core", class_code=0x020700
    ),
    "cx6dx": NicProduct(vendor=0x15B3, device=0x101D, link="16x16", driver="mlx5_core"),
    "cx7": NicProduct(vendor=0x15B3, device=0x1021, link="32x16", driver="mlx5_core"),
    "cx7-ib": NicProduct(
        vendor=0x15B3, device=0x1021, link="32x16", driver="mlx5_core", class_code=0x020700
    ),
    "cx-vf": NicProduct(vendor=0x15B3, device=0x101E, link="16x16", driver="mlx5_core"),
    "bcm5720": NicProduct(vendor=0x14E4, device=0x165F, link="5x2", driver="tg3"),
    "virtio": NicProduct(vendor=0x1AF4, device=0x1041, link="", driver="virtio-pci"),
}

# Profile of an 80 GB A100 → GPU slices, compute slices and MiB as nvmlDeviceGetAttributes has them.
MIG_PROFILES = {
    "1g.10gb": (1, 1, 9728),
    "1g.10gb+me": (1, 1, 9728),
    "2g.20gb": (2, 2, 19968),
    "3g.40gb": (3, 3, 40192),
    "1c.3g.40gb": (3, 1, 40192),
    "2c.3g.40gb": (3, 2, 40192),
    "4g.40gb": (4, 4, 40192),
    "7g.80gb": (7, 7, 80896),
}
