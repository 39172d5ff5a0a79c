"""XML of strangers: bounded, and without anything that XML can do beside elements.

Entities are never declared, let alone expanded; nothing outside of the text is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from rte.sources.problem import SourceError

# The largest real files: hwloc's of a machine with 384 CPUs has 6 000 elements, 20 levels deep.
MAX_ELEMENTS = 200_000
MAX_DEPTH = 128
MAX_TEXT = 4 << 20


@dataclass(slots=True)
class Element:
    """An element with its place in the text, for errors that name it."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def get(self, name: str, default: str = "") -> str:
        return self.attributes.get(name, default)

    def all(self, tag: str) -> Iterator[Element]:
        """The children of this name."""
        return (child for child in self.children if child.tag == tag)

    def walk(self) -> Iterator[Element]:
        """This and everything below, in the order of the text."""
        open_ = [self]
        while open_:
            element = open_.pop()
            yield element
            open_.extend(reversed(element.children))


def parse_xml(text: bytes, name: str) -> Element:
    """The root element. Raises SourceError, with the place, for whatever is not plain XML."""
    builder = _Builder(name)
    parser = expat.ParserCreate()
    builder.parser = parser
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.characters
    parser.StartDoctypeDeclHandler = builder.doctype
    parser.EntityDeclHandler = builder.entity
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise SourceError(
            f"{name}: line {error.lineno}, column {error.offset + 1}: not well-formed XML: "
            f"{expat.ErrorString(error.code)}; is the file whole?"
        ) from error
    except (ValueError, LookupError) as error:  # what Python says of odd encodings
        raise SourceError(f"{name}: an encoding that is not supported: {error}") from error
    if builder.root is None:
        raise SourceError(f"{name}: no element in it")
    return builder.root


class _Builder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.root: Element | None = None
        self.parser: expat.XMLParserType | None = None
        self.open: list[Element] = []
        self.elements = 0
        self.characters_left = MAX_TEXT

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if self.elements > MAX_ELEMENTS:
            self.refuse(f"more than {MAX_ELEMENTS} elements")
        if len(self.open) >= MAX_DEPTH:
            self.refuse(f"elements more than {MAX_DEPTH} deep")
        element = Element(tag, attributes, self.line)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def end(self, tag: str) -> None:
        self.open.pop()

    def characters(self, text: str) -> None:
        if text.isspace():
            return
        self.characters_left -= len(text)
        if self.characters_left < 0:
            self.refuse(f"more than {MAX_TEXT} characters between elements")
        if self.open:
            self.open[-1].text += text

    def doctype(self, name: str, system: str | None, public: str | None, internal: bool) -> None:
        # hwloc names a DTD, which nobody reads; declarations of its own a topology never has.
        if internal:
            self.refuse("a document type with declarations of its own")

    def entity(self, *_: object) -> None:
        self.refuse("an entity declaration")

    @property
    def line(self) -> int:
        return self.parser.CurrentLineNumber if self.parser else 0

    def refuse(self, what: str) -> None:
        raise SourceError(f"{self.name}: line {self.line}: {what}; no topology file has that")
