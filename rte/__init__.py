"""Node agent for GPU clusters: one graph of the node for the kubelet, schedulers and people."""

__version__ = "0.1.0"
