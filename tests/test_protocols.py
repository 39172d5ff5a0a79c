"""That our protocol files are the kubelet's, and the generated code theirs."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from plugin.api import deviceplugin_pb2, deviceplugin_pb2_grpc, pluginregistration_pb2
from rte.kubelet.api import pod_pb2, podresources_pb2, pods_pb2
from tests.conftest import GoProgram

ROOT = Path(__file__).parents[1]
WHOLE = (deviceplugin_pb2, pluginregistration_pb2, podresources_pb2, pods_pb2)
GENERATED = (*WHOLE, pod_pb2)
PROTO_FILES = [module.DESCRIPTOR.name for module in GENERATED]


def test_the_generator_is_the_one_that_made_the_code() -> None:
    # Another version writes other code from the same file: install this one, or generate all anew
    # and raise the least versions of grpcio and protobuf in pyproject.toml with it.
    made_by: str = deviceplugin_pb2_grpc.GRPC_GENERATED_VERSION
    assert importlib.metadata.version("grpcio-tools") == made_by


@pytest.mark.parametrize("proto", PROTO_FILES)
def test_generated_code_is_what_the_protocol_file_gives(proto: str, tmp_path: Path) -> None:
    generate = [sys.executable, "-m", "grpc_tools.protoc", "-I.", proto]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*generate, *outputs], cwd=ROOT, check=True)
    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        name = proto.removesuffix(".proto") + suffix
        assert (ROOT / name).read_text() == (tmp_path / name).read_text(), name


@pytest.mark.parametrize("module", WHOLE, ids=PROTO_FILES[: len(WHOLE)])
def test_the_protocol_file_is_upstreams_structure_for_structure(
    module: ModuleType, go_program: GoProgram
) -> None:
    written = subprocess.run([go_program("protocols")], capture_output=True, check=True).stdout
    upstream = {file.package: file for file in FileDescriptorSet.FromString(written).file}
    ours = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(ours)
    assert structure(ours) == structure(upstream[ours.package])


def test_what_is_read_of_a_pod_is_a_part_of_upstreams_type(go_program: GoProgram) -> None:
    written = subprocess.run([go_program("protocols")], capture_output=True, check=True).stdout
    (upstream,) = (
        file
        for file in FileDescriptorSet.FromString(written).file
        if file.package == "k8s.io.api.core.v1"
    )
    theirs = {
        (message.name, field.number): (field.name, field.label, field.type, last(field.type_name))
        for message in upstream.message_type
        for field in message.field
    }
    ours = {
        (message.name, field.number): of_field(field)
        for message in pod_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        # A quantity writes itself; the real kubelet's are read in test_pods_api.py.
        if message.name != "Quantity"
    }
    assert ours == {key: theirs[key] for key in ours}
    assert ("PodStatus", 9) in ours


def of_field(field: FieldDescriptor) -> tuple[str, int, int, str]:
    """Name, label, type and message; a map is its values, again and again."""
    label = FieldDescriptor.LABEL_REPEATED if field.is_repeated else FieldDescriptor.LABEL_OPTIONAL
    of = field.message_type
    if of is not None and of.GetOptions().map_entry:
        of = of.fields_by_name["value"].message_type
    return field.name, label, field.type, of.name if of is not None else ""


def last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def structure(file: FileDescriptorProto) -> str:
    """The file as text, without what does not reach the wire: names, order, options of Go."""
    plain = FileDescriptorProto()
    plain.CopyFrom(file)
    for field in ("name", "options", "source_code_info"):
        plain.ClearField(field)
    plain.message_type.sort(key=lambda message: message.name)
    for message in plain.message_type:
        arrange(message)
    plain.service.sort(key=lambda service: service.name)
    for service in plain.service:
        service.method.sort(key=lambda method: method.name)
        for method in service.method:
            method.ClearField("options")
    return str(plain)


def arrange(message: DescriptorProto) -> None:
    message.field.sort(key=lambda field: field.number)
    for field in message.field:
        field.ClearField("json_name")
    message.nested_type.sort(key=lambda nested: nested.name)
    for nested in message.nested_type:
        arrange(nested)
