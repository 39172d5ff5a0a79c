"""The kubelet's PodResources and pods protocols, and what is read of a pod.

Generated but for the .proto file. From the repository's root:
python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \\
    rte/kubelet/api/*.proto
"""
