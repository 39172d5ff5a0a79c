"""Node agent for GPU clusters: one graph of the node for the kubelet, schedulers and people."""
