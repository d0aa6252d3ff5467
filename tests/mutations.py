"""Damage that knows the grammar: documents, archives and messages with something wrong in them, by a seed.

A valid document is taken apart, a few of its parts are changed (removed, of another type, huge, not finite,
negative, doubled, nested, named like another), and it is written again, so that most of it is still right and
a reader comes far. Sometimes its bytes are damaged as well: cut, flipped, repeated, in another encoding.
"""

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

Mutation = Callable[[random.Random], bytes]
DEEP = 100_000  # brackets in one another

NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 3, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**80, -(2**63), -(2**70),
    10**30, 0.5, -0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
WORDS: tuple[str, ...] = (
    "", " ", "\0", "x", "0", "-1", "1e999", "nan", "\ud83d\ude00", "a" * 3000, "../../etc/passwd", "[0]",
    "null", "float32", "é", "id", "9" * 400, "1" * 19, "\u202e", "%s%n", "{0}", "node1", "true",
)  # fmt: skip


def any_value(rng: random.Random) -> Any:
    """Something that stands in no good document at this place."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice(WORDS)
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return [rng.choice(NUMBERS) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(WORDS): rng.choice(NUMBERS) for _ in range(rng.randrange(3))}
    return _nest(rng.choice(NUMBERS), rng.choice((1, 3, 40)))


def _nest(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree of dicts and lists."""
    found, stack = [], [value]
    while stack:
        here = stack.pop()
        keys: Any = (
            list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        )
        for key in keys:
            found.append((here, key))
            stack.append(here[key])
    return found


def change_tree(tree: Any, rng: random.Random) -> Any:
    """One change somewhere in a tree, which is altered."""
    places = _list_places(tree)
    if not places or rng.random() < 0.01:
        return any_value(rng)
    where, key = rng.choice(places)
    old = where[key]
    kind = rng.randrange(9)
    if kind == 0:
        del where[key]
    elif kind == 1 and isinstance(where, list):
        where.insert(rng.randrange(len(where) + 1), json.loads(json.dumps(old)))  # twice
    elif kind == 2:
        other, there = rng.choice(places)  # a value of another place: names and ids that repeat, cycles
        if isinstance(other, dict | list) and (
            there in other if isinstance(other, dict) else there < len(other)
        ):
            where[key] = json.loads(json.dumps(other[there]))
    elif kind == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        where[key] = rng.choice((-old, old + 1, old - 1, old * 2**40, old / 3, str(old), bool(old)))
    elif kind == 4 and isinstance(old, str):
        where[key] = rng.choice((old + "x", old[:-1], old * 50, old.upper(), rng.choice(WORDS)))
    elif kind == 5 and isinstance(where, dict):
        where[rng.choice((*WORDS, *where))] = any_value(rng)
    elif kind == 6 and isinstance(old, list):
        rng.shuffle(old)
    else:
        where[key] = any_value(rng)
    return tree


def change_json(document: bytes) -> Mutation:
    """A JSON document with a few changes, sometimes of its text."""

    def mutate(rng: random.Random) -> bytes:
        tree = json.loads(document)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            tree = change_tree(tree, rng)
        data = json.dumps(tree).encode("utf-8", "surrogatepass")
        roll = rng.random()
        if roll < 0.01:
            at = data.find(b":") + 1
            return data[:at] + rng.choice((b"[", b'{"a":')) * DEEP + data[at:]
        return change_bytes(data, rng) if roll < 0.15 else data

    return mutate


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, cut, repeated or added, or all of them in another encoding."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not made:
            break
        at, length = rng.randrange(len(made)), rng.choice((1, 2, 8, 64))
        kind = rng.randrange(7)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at:]
        elif kind == 2:
            del made[at : at + length]
        elif kind == 3:
            made[at:at] = made[at : at + length] * rng.choice((1, 2, 30))
        elif kind == 4:
            made[at : at + length] = rng.randbytes(length)
        elif kind == 5:
            made[at:at] = rng.choice(
                (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc0\x80", b"\n", b"}", b"]", b'"')
            )
        else:
            made = bytearray(bytes(made).decode("latin-1").encode(rng.choice(("utf-16", "utf-32", "utf-8"))))
    return bytes(made)


def change_text(text: bytes) -> Mutation:
    """Lines and words of a text taken from one another, numbers replaced; or bytes damaged."""

    def mutate(rng: random.Random) -> bytes:
        if rng.random() < 0.25:
            return change_bytes(text, rng)
        lines = text.split(b"\n")
        for _ in range(rng.choice((1, 1, 2, 3))):
            at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            kind = rng.randrange(6)
            if kind == 0:
                lines[at] = b""
            elif kind == 1:
                lines.insert(at, lines[other])
            elif kind == 2:
                lines[at], lines[other] = lines[other], lines[at]
            else:
                words = lines[at].split(b" ")
                word = str(rng.choice(NUMBERS + WORDS)).encode("utf-8", "surrogatepass")
                target = rng.randrange(len(words))
                key, equals, _ = words[target].partition(b"=")
                words[target] = key + equals + word if equals and kind > 3 else word
                lines[at] = b" ".join(words)
        return b"\n".join(lines)

    return mutate


def change_toml(document: dict[str, Any]) -> Mutation:
    """A TOML file of a tree with a few changes, or with its text damaged."""
    whole = _write_toml(document)
    damage = change_text(whole)

    def mutate(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return damage(rng)
        tree = json.loads(json.dumps(document))
        for _ in range(rng.choice((1, 1, 2, 4))):
            tree = change_tree(tree, rng)
        return _write_toml(tree) if isinstance(tree, dict) else damage(rng)

    return mutate


def _write_toml(tree: dict[str, Any]) -> bytes:
    return "\n".join(f"{json.dumps(key)} = {_toml_value(value)}" for key, value in tree.items()).encode(
        "utf-8", "surrogatepass"
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, float) and value != value:
        return "nan"
    return '"none"' if value is None else json.dumps(value, ensure_ascii=False)


def change_xml(document: bytes) -> Mutation:
    """Elements and attributes of an XML tree removed, doubled, moved and changed; entities; damaged bytes."""

    def mutate(rng: random.Random) -> bytes:
        root = ElementTree.fromstring(document)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change_element(root, rng)
        data = ElementTree.tostring(root)
        roll = rng.random()
        if roll < 0.03:
            return BILLION_LAUGHS + data.replace(b'name="', b'name="&d;', 1)
        if roll < 0.04:
            return b"<net>" * DEEP + data
        return change_bytes(data, rng) if roll < 0.15 else data

    return mutate


BILLION_LAUGHS = (
    b'<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa">'
    + b"".join(b'<!ENTITY %c "%s">' % (name, b"&%c;" % (name - 1) * 50) for name in range(ord("b"), ord("j")))
    + b"]>"
)


def _change_element(root: ElementTree.Element, rng: random.Random) -> None:
    parents = [(each, child) for each in root.iter() for child in each]
    element = rng.choice(list(root.iter()))
    kind = rng.randrange(7)
    if kind == 0 and parents:
        above, child = rng.choice(parents)
        above.remove(child)
    elif kind == 1 and parents:
        above, child = rng.choice(parents)
        above.append(child)
    elif kind == 2 and parents:
        _, child = rng.choice(parents)
        element.append(ElementTree.fromstring(ElementTree.tostring(child)))
    elif kind == 3:
        element.text = _xml_text(rng)
    elif kind == 4 and element.attrib:
        del element.attrib[rng.choice(list(element.attrib))]
    elif element.attrib:
        name = rng.choice(list(element.attrib))
        element.set(name, _xml_text(rng))
    else:
        element.tag = rng.choice(("net", "layer", "port", "dim", "edge", "data", "x"))


def _xml_text(rng: random.Random) -> str:
    word = str(rng.choice(NUMBERS + WORDS + tuple(range(12))))
    return "".join(c for c in word if c.isprintable()).encode("utf-8", "ignore").decode()


def change_zip(members: dict[str, bytes], program: str) -> Mutation:
    """An archive with one JSON member changed, members removed or doubled, and lies in its directory."""
    change = change_json(members[program])

    def mutate(rng: random.Random) -> bytes:
        made = dict(members)
        if rng.random() < 0.85:
            made[program] = change(rng)
        if rng.random() < 0.2:
            name = rng.choice(list(made))
            made[name] = change_bytes(made[name], rng) if rng.random() < 0.5 else b""
        if rng.random() < 0.1:
            del made[rng.choice(list(made))]
        buffer = io.BytesIO()
        packed = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        with zipfile.ZipFile(buffer, "w", packed, compresslevel=1) as archive:
            for name, data in made.items():
                archive.writestr(f"tiny/{name}", data)
        data = buffer.getvalue()
        return _lie_about_sizes(data, rng) if rng.random() < 0.2 else data

    return mutate


def _lie_about_sizes(data: bytes, rng: random.Random) -> bytes:
    """Another number in a header of the archive: method, sizes, lengths of names, offsets, counts."""
    made = bytearray(data)
    headers = [
        at
        for at in range(len(data) - 46)
        if data[at : at + 4] in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
    ]
    at = rng.choice(headers or [0]) + rng.choice((4, 6, 8, 10, 14, 16, 18, 20, 22, 24, 26, 28, 42))
    made[at : at + 2] = struct.pack("<H", rng.choice((0, 1, 8, 12, 14, 99, 255, 65535)))
    return bytes(made)


def change_tensor_file(data: bytes) -> Mutation:
    """A safetensors file whose header, or whose length, says something else."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    change = change_json(header)

    def mutate(rng: random.Random) -> bytes:
        roll = rng.random()
        if roll < 0.2:
            return change_bytes(data, rng)
        if roll < 0.3:
            wrong = rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1, 10**8))
            return wrong.to_bytes(8, "little") + header + rest
        moved = json.dumps(_move_tensors(json.loads(header), rng)).encode()
        text = moved if roll < 0.5 else change(rng)
        return len(text).to_bytes(8, "little") + text + rest[: rng.choice((len(rest), len(rest) // 2))]

    return mutate


def _move_tensors(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Ranges that overlap, leave holes, or hold shapes of nothing."""
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    begin, end = entry["data_offsets"]
    kind = rng.randrange(4)
    if kind == 0:
        shift = rng.choice((-8, -4, 4, 8, 2**40))
        entry["data_offsets"] = [begin + shift, end + shift]
    elif kind == 1:
        entry["data_offsets"], entry["shape"] = [begin, begin], [0, rng.choice((2**31, 2**62, 2**70))]
    elif kind == 2:
        entry["shape"] = [*entry["shape"], *[1] * rng.choice((1, 63, 70, 3000))]
    else:
        entry["data_offsets"], entry["shape"] = [end, begin], [-1, -(end - begin) // 4]
    return header


def change_journal(lines: list[bytes]) -> Mutation:
    """Records with right check sums and wrong content, or damaged bytes."""

    def mutate(rng: random.Random) -> bytes:
        made = list(lines)
        if rng.random() < 0.8:
            at = rng.randrange(len(made))
            body = change_json(made[at][9:])(rng).replace(b"\n", b" ")
            made[at] = b"%08x " % zlib.crc32(body) + body
        data = b"\n".join(made) + b"\n"
        return change_bytes(data, rng) if rng.random() < 0.3 else data

    return mutate


def change_message(message: Any) -> Mutation:
    """A protobuf message with fields removed, repeated and set to odd values; or damaged bytes."""
    whole = message.SerializeToString()

    def mutate(rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return change_bytes(whole, rng)
        copy = type(message).FromString(whole)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change_field(copy, rng)
        data = bytes(copy.SerializeToString())
        return change_bytes(data, rng) if rng.random() < 0.05 else data

    return mutate


def _list_messages(message: Any) -> list[Any]:
    found, stack = [], [message]
    while stack:
        here = stack.pop()
        found.append(here)
        for field, value in here.ListFields():
            if field.type == field.TYPE_MESSAGE:
                stack += list(value) if hasattr(value, "add") else [value]
    return found


def _change_field(message: Any, rng: random.Random) -> None:
    target = rng.choice(_list_messages(message))
    present = target.ListFields()
    if present and rng.random() < 0.3:
        field, value = rng.choice(present)
        if hasattr(value, "add") and len(value) and rng.random() < 0.7:
            value.append(value[rng.randrange(len(value))])  # twice, or one taken out
            if rng.random() < 0.5:
                del value[rng.randrange(len(value))]
        else:
            target.ClearField(field.name)
        return
    field = rng.choice(
        [each for each, _ in present] if present and rng.random() < 0.8 else list(target.DESCRIPTOR.fields)
    )
    if field.type == field.TYPE_MESSAGE:
        return
    value = getattr(target, field.name)
    numbers = [int(each) for each in NUMBERS if isinstance(each, int) and abs(each) < 2**31]
    numbers += [2**62, -(2**62)] if field.type == field.TYPE_INT64 else []
    choices: Any = {
        field.TYPE_STRING: [w.replace("\0", "") for w in WORDS],
        field.TYPE_BYTES: [b"", b"\xff" * 9, b"x" * 4000],
        field.TYPE_FLOAT: [0.0, -1.0, float("nan"), float("inf")],
        field.TYPE_DOUBLE: [0.0, -1.0, float("nan"), float("inf")],
    }.get(field.type, numbers)
    made = rng.choice(choices)
    try:
        if hasattr(value, "append"):
            if len(value) and rng.random() < 0.6:
                value[rng.randrange(len(value))] = made
            else:
                value.extend([made] * rng.choice((1, 2, 70)))
        else:
            setattr(target, field.name, made)
    except (ValueError, TypeError):
        return  # an enum of few values, or a number that its type does not hold
