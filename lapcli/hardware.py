"""What a device can do at best: dense bf16 tensor-core FLOP/s, from the vendors' data sheets."""

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """Of one device, None where it is not known (a CPU, an unlisted GPU)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)
