"""`rte show [SOURCE]`: the machine as a tree and as the familiar matrix."""

from __future__ import annotations

import argparse
import json
import sys

from rte.commands.source import CannotRead, Source, add_source, read_source
from rte.view.document import document
from rte.view.dot import dot
from rte.view.nccl import NotForNccl, nccl
from rte.view.smi import smi
from rte.view.svg import svg
from rte.view.text import text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        choices=["text", "json", "yaml", "svg", "dot", "smi", "nccl"],
        default="text",
        help="text for people (default), json or yaml for programs, svg as a picture, dot for "
        "Graphviz, smi as `nvidia-smi topo -m`, nccl as a file for NCCL_TOPO_FILE",
    )
    add_source(parser)


def main(args: argparse.Namespace) -> int:
    try:
        shown = rendered(read_source(args), args.output)
    except (CannotRead, NotForNccl) as error:
        print(f"rte show: {error}", file=sys.stderr)
        return 2
    print(shown, end="")
    return 0


def rendered(source: Source, output: str) -> str:
    if output == "text":
        return text(source.graph, source.groups)
    if output == "smi":
        return smi(source.graph)
    if output == "nccl":
        return nccl(source.graph)
    if output == "dot":
        return dot(source.graph, source.groups)
    if output == "svg":
        return svg(source.graph, source.groups)
    values = document(source.graph, source.groups)
    if output == "json":
        return json_text(values)
    import yaml  # noqa: PLC0415 - 10 MiB for one format

    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def json_text(values: object) -> str:
    """JSON for programs that people also read: lists of plain values stay on one line."""
    return nested(values, "") + "\n"


def nested(value: object, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = (f"{inner}{json.dumps(k)}: {nested(v, inner)}" for k, v in value.items())
        flat = json.dumps(value, ensure_ascii=False)
        if indent and len(flat) + len(indent) <= 100 and not any(map(is_nest, value.values())):
            return flat
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(map(is_nest, value)):
        return "[\n" + ",\n".join(inner + nested(v, inner) for v in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def is_nest(value: object) -> bool:
    return isinstance(value, dict | list) and bool(value)
