"""The kubelet's device plugin and plugin registration protocols.

Generated but for the two .proto files. From the repository's root:
python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. plugin/api/*.proto
"""
