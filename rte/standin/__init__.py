"""A stand-in for the kubelet, on its real sockets and with its real files: for the demo and tests.

It admits the pods that it is handed and decides by `rte.kubelet.admission` alone; it starts no
container, knows no API server, and is no part of what runs on a node.
"""
