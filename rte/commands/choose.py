"""`rte choose [SOURCE] --size N`: which GPUs a request would get, and why."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator

from rte.commands.show import json_text
from rte.commands.source import CannotRead, add_source, read_source
from rte.graph.build import Graph
from rte.graph.choose import Choice, choose
from rte.graph.parts import Sharing, choose_parts
from rte.model import DeviceId, pci_address
from rte.view.reason import choice_document, reason
from rte.view.rest import rest, rest_document, rest_said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ids = "UUIDs, numbers or ranges (0-3), gpu-<n> or PCI addresses, comma-separated"
    parser.add_argument("--size", type=int, required=True, help="how many the container asks for")
    parser.add_argument(
        "--available",
        metavar="IDS",
        action="append",
        help=f"what the kubelet offers: {ids}; MIG slices and replicas (ID::n) too "
        "(default: every GPU that answers)",
    )
    parser.add_argument(
        "--required", metavar="IDS", action="append", help="what must be among the answer"
    )
    parser.add_argument(
        "--free",
        metavar="IDS",
        action="append",
        help="what is free on the whole node (default: what is offered)",
    )
    parser.add_argument(
        "--sharing",
        choices=[str(sharing) for sharing in Sharing],
        default=str(Sharing.DISTRIBUTED),
        help="how MIG slices and replicas are taken from GPUs (default: distributed)",
    )
    parser.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="for people or programs"
    )
    add_source(parser)


def main(args: argparse.Namespace) -> int:
    try:
        if args.size < 1:
            raise CannotRead(f"--size {args.size}: expected at least 1")
        graph = read_source(args).graph
        choice = answer(graph, args)
        left = rest(graph, choice.chosen, free_before(graph, args))
    except CannotRead as error:
        print(f"rte choose: {error}", file=sys.stderr)
        return 2
    if args.output == "json":
        print(json_text({**choice_document(choice), "rest": rest_document(left)}), end="")
    else:
        print(reason(graph, choice), end="")
        if len(choice.chosen) < args.size:
            print(f"Asked for {args.size}: no more than these are offered.")
        if choice.chosen:
            print(f"For the rest of the node: {rest_said(left)}.")
    return 0


def free_before(graph: Graph, args: argparse.Namespace) -> list[str]:
    """The whole GPUs that are free, offered ones always; one with a used part is not free."""
    offered = graph.ids if args.available is None else parsed(graph, args.available)
    free = [*offered, *(parsed(graph, args.free) if args.free is not None else ())]
    return [id for id in free if id in set(graph.ids)]


def answer(graph: Graph, args: argparse.Namespace) -> Choice:
    offered = list(graph.ids) if args.available is None else parsed(graph, args.available)
    required = parsed(graph, args.required or ())
    free = None if args.free is None else parsed(graph, args.free)
    parts = parts_of(graph, [*offered, *required])
    if parts:
        return choose_parts(
            graph,
            parts=parts,
            available=offered,
            required=required,
            size=args.size,
            free=free,
            sharing=Sharing(args.sharing),
        )
    return choose(
        graph, available=offered, required=required, size=args.size, free=free, explain=True
    )


def parsed(graph: Graph, lists: Iterable[str]) -> list[DeviceId]:
    """The device ids that the words stand for, in their order. Raises CannotRead."""
    words = [word for text in lists for word in re.split(r"[,\s]+", text) if word]
    return [id for word in words for id in resolved(graph, word)]


def resolved(graph: Graph, word: str) -> Iterator[DeviceId]:
    by_number = {gpu.number: i for i, gpu in enumerate(graph.gpus)}
    whole, mark, replica = word.partition("::")
    if mark:
        yield from (DeviceId(f"{id}::{replica}") for id in resolved(graph, whole))
    elif match := re.fullmatch(r"(?:gpu-)?(\d+)(?:-(\d+))?", word, re.IGNORECASE):
        first = int(match[1])
        for number in range(first, int(match[2] or first) + 1):
            yield graph.ids[position(graph, by_number.get(number), word)]
    elif word in graph.position:
        yield DeviceId(word)
    else:
        try:
            address = pci_address(word)
        except ValueError:
            position(graph, None, word)
            raise
        places = {gpu.pci: i for i, gpu in enumerate(graph.gpus)}
        yield graph.ids[position(graph, places.get(address), word)]


def position(graph: Graph, found: int | None, word: str) -> int:
    if found is not None:
        return found
    lost = [gpu.name for gpu in graph.machine.gpus if gpu.lost is not None]
    there = " ".join(gpu.name for gpu in graph.gpus) or "no GPU"
    raise CannotRead(
        f"{word!r}: no GPU or MIG slice of this machine that answers; there is {there}"
        + (f", and lost are {' '.join(lost)}" if lost else "")
    )


def parts_of(graph: Graph, ids: Iterable[DeviceId]) -> dict[DeviceId, DeviceId]:
    """The GPU of each MIG slice and replica, with all slices of the same profiles; {} of GPUs.

    Slices that are not offered count as used, as the plugin would count them.
    """
    asked = list(dict.fromkeys(ids))
    whole = set(graph.ids)
    if all(id in whole for id in asked):
        return {}
    slices = {slice.id: slice for gpu in graph.gpus for slice in gpu.slices}
    profiles = {slices[id].profile for id in asked if id in slices}
    found = {
        slice.id: id
        for id, gpu in zip(graph.ids, graph.gpus, strict=True)
        for slice in gpu.slices
        if slice.profile in profiles
    }
    for id in asked:
        parent = DeviceId(id.partition("::")[0])
        found.setdefault(id, graph.ids[graph.position[parent]])
    return found
