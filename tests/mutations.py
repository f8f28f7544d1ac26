"""Hostile .npy and .safetensors files, made from sound ones. Knows nothing of poolgrad."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

NUMBERS = [0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**40]
NPY_NUMBERS = [*map(str, NUMBERS), "9" * 5000, "0x" + "f" * 4000, "1_0", "1e400", "True", "None", "-0", "1.0", "2L"]
JSON_NUMBERS = [*map(str, NUMBERS), "9" * 5000, "1e400", "true", "null", "-0", "1.0", "NaN", "-Infinity", "[]", '"8"']

NAMES = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b2Jcleared",
    "two\nlines\r\n",
    "nul\0inside",
    "\ufeffBOM",
    "\u202egnidaer",
    "é 中 \U0001f600",
    "[bold red]markup[/]",
    "../../../../tmp/outside",
    "%s%n{0}",
    "__metadata__",
    "grad_output",
    "self",
    " ",
    "",
    "n" * 200_000,
]

DESCRS = [
    *("'|O'", "'O8'", "'<f8'", "'>f4'", "'<f2'", "'<c8'", "'|b1'", "'<V2'", "'|V1'", "'|V0'", "'<U3'", "'|S0'"),
    *("'<M8[s]'", "'<m8'", "'<f16'", "'(2,2)<f2'", "'(1000000,1000000)<f4'", "'<f4,<f4'", "',,,'"),
    *("[('a', '<f4')]", "[('a', '|O')]", "[('\\x1b[31m', '<f4')]", "('<f4', (2147483647,))", "{'a': 1}", "None", "0"),
    *("'\\ud800'", "'\\x00'", "'bfloat16'", "'float8_e4m3fn'", "'<f4' '2'", "b'<f4'", "'(1,)<f4'"),
    "'" + "f4," * 900 + "f4'",
    "__import__('os').mkdir('{bomb}')",
]  # fmt: skip

DTYPES = ["BOOL", "U8", "I8", "U16", "I16", "F16", "BF16", "U32", "F32", "F64", "C64", "U64", "F4", "F6_E2M3"]
DTYPES += ["F8_E4M3", "F8_E8M0", "F9_NEW", "f32", "O", "", "\\u001b[31m", "\\ud800", "F" * 50_000]


def flip(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    reach = rng.choice([16, 128, len(data)])
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(min(reach, len(data)))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(rng.choice([16, 200, len(content)]))]


def cut_out(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    count: int = rng.choice([1, 2, 8, 100])
    return content[:place] + content[place + count :]


def put_in(content: bytes, rng: random.Random) -> bytes:
    place: int = rng.choice([0, 8, 10, rng.randrange(len(content)), len(content)])
    addition: bytes = rng.choice([b"\xef\xbb\xbf", b"\0", b"\xff\xfe", b"\x1b[2J", rng.randbytes(40)])
    return content[:place] + addition + content[place:]


def run_of_one(content: bytes, rng: random.Random) -> bytes:
    place, count = rng.randrange(len(content)), rng.choice([1, 8, 64])
    run: bytes = rng.choice([b"\0", b"\xff", b" ", b"9"]) * count
    return content[:place] + run + content[place + count :]


def binary_length(content: bytes, rng: random.Random) -> bytes:
    """Another number in the header's length field: 2 or 4 bytes in .npy, 8 in .safetensors."""
    start, count = (8, rng.choice([2, 4])) if content.startswith(b"\x93") else (0, 8)
    number: int = rng.choice([*NUMBERS, rng.randrange(len(content)), len(content), 100_000_001]) % 256**count
    return content[:start] + number.to_bytes(count, "little") + content[start + count :]


def other_version(content: bytes, rng: random.Random) -> bytes:
    return content[:6] + bytes([rng.choice([0, 2, 3, 4, 255]), rng.choice([0, 1])]) + content[8:]


def both_ends(content: bytes, rng: random.Random) -> bytes:
    """What is behind a sound file's start may be anything: a pickle, an archive, or the file once more."""
    rest: bytes = rng.choice([content, b"PK\3\4", b"\x80\4\x95", b"<html>", b"\x1f\x8b"])
    return content[: rng.randrange(200)] + rest


# ---- .npy


def on_npy_text(edit: Callable[[str, random.Random], str]) -> Mutation:
    """A change of the header's text, with the length field made right for it, in any version."""

    def mutation(content: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(content[8:10], "little")
        text = edit(content[10 : 10 + length].decode("latin1").rstrip(), rng)
        version = rng.choice([1, 1, 1, 2, 3])
        raw = text.encode("utf-8" if version == 3 else "latin1", "backslashreplace")
        raw += b" " * (-(len(raw) + (11 if version == 1 else 13)) % 64) + b"\n"
        field = min(len(raw), 65535).to_bytes(2, "little") if version == 1 else len(raw).to_bytes(4, "little")
        return b"\x93NUMPY" + bytes([version, 0]) + field + raw + content[10 + length :]

    mutation.__name__ = edit.__name__
    return mutation


def npy_number(text: str, rng: random.Random) -> str:
    return replace_number(text, rng, NPY_NUMBERS, r"(?<=[( ])\d+(?=[,)])")


def replace_number(text: str, rng: random.Random, numbers: list[str], pattern: str) -> str:
    for _ in range(rng.choice([1, 1, 2])):
        places = list(re.finditer(pattern, text))
        if not places:
            break
        place = rng.choice(places)
        text = text[: place.start()] + rng.choice(numbers) + text[place.end() :]
    return text


def npy_dtype(text: str, rng: random.Random) -> str:
    return re.sub(r"(?<='descr': )'[^']*'", lambda _: rng.choice(DESCRS), text)


def npy_shape(text: str, rng: random.Random) -> str:
    shapes = [
        *("()", "(1,)*9", "[1, 2]", "(1, (2, 3))", "1", "None", "(True, 2)", "(1, 2, 16, 16, 1)", "(0,)", "(0, -1)"),
        *("(" + "1," * n + ")" for n in (64, 65, 4000)),
        *("(" + "2147483648," * n + ")" for n in (2, 3, 63)),
        "(0, 2147483648, 2147483648, 2147483648)",
        "(__import__('os').mkdir('{bomb}'), 1)",
        "(lambda: 1)()",
        "(1, 2, 16, *[16])",
        "{1: 2}",
    ]
    return re.sub(r"\([\d, ]*\)", lambda _: rng.choice(shapes), text)


def npy_keys(text: str, rng: random.Random) -> str:
    additions = [
        "'shape': (1, 1, 1), ",
        "'descr': '|O', ",
        "'x': {'descr': {}}, ",
        "**{}, ",
        "'\x1b[31m': 1, ",
        "1: 2, ",
    ]
    edits = [
        text.replace("{", "{" + rng.choice(additions), 1),
        text.replace("}", rng.choice(additions) + "}", 1),
        text.replace("'fortran_order'", rng.choice(["'order'", "b'fortran_order'", "'fortran_order\\x00'"])),
        text.replace("False", rng.choice(["True", "1", "None", "'False'", "not 1", "True"])),
        f"[{text}]",
        text * 2,
        "#" + text,
        text.replace("'", '"'),
        text.replace(", ", ",\n"),
        '"""' + text,
        "",
    ]
    return rng.choice(edits)


def npy_deep(text: str, rng: random.Random) -> str:
    depth = rng.choice([60, 99, 101, 500, 3000, 9500])
    left, right = rng.choice(
        [("(", ")"), ("[", "]"), ("{1:", "}"), ("-", ""), ("not ", ""), ("f(", ")"), ("1+", ""), ("~", "")]
    )
    deep = (left * depth)[:9500] + "1" + right * rng.choice([0, depth])
    return rng.choice([deep, re.sub(r"\([\d, ]*\)", lambda _: deep, text)])


# ---- .safetensors


def on_json(edit: Callable[[str, random.Random], str]) -> Mutation:
    """A change of the header's text, with the length field made right for it."""

    def mutation(content: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(content[:8], "little")
        raw = edit(content[8 : 8 + length].decode().rstrip(), rng).encode("utf-8", "surrogatepass")
        return len(raw).to_bytes(8, "little") + raw + content[8 + length :]

    mutation.__name__ = edit.__name__
    return mutation


def json_number(text: str, rng: random.Random) -> str:
    return replace_number(text, rng, JSON_NUMBERS, r"(?<=[\[,])\d+(?=[\],])")


def json_dtype(text: str, rng: random.Random) -> str:
    return re.sub(r'(?<="dtype":")\w+', lambda _: rng.choice(DTYPES), text, count=2)


def json_names(text: str, rng: random.Random) -> str:
    """Other names for the tensors, written plainly or as escapes."""
    header = {name if rng.random() < 0.3 else rng.choice(NAMES): entry for name, entry in json.loads(text).items()}
    return json.dumps(header, ensure_ascii=rng.random() < 0.5)


def json_text(text: str, rng: random.Random) -> str:
    """Keys there twice, nested and of other types, and what is no JSON at all."""
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    additions = [
        *(
            f'"grad_output":{entry},',
            '"a":{},',
            '"a":[],',
            '"a":null,',
            '"\\ud800":1,',
            '"\\u0000":{},',
            '"":' + entry + ",",
        ),
        *('"__metadata__":{"a":1},', '"__metadata__":[],', '"__metadata__":{"\x1b[31m":"x"},', '"__metadata__":{},'),
        f'"a":{{"a":{entry}}},',
        '"a":{"dtype":{"dtype":"F32"},"shape":{},"data_offsets":[[0],[4]]},',
    ]
    edits = [
        text.replace("{", "{" + rng.choice(additions), 1),
        text.replace("{", "{" + rng.choice(additions), 2),
        text.replace('"shape":', rng.choice(['"shape":[1],"shape":', '"Shape":', '"shape\\u0000":'])),
        text.replace("[", rng.choice(["[[", "[1,", "{", "[null,"]), rng.choice([1, 2])),
        text + rng.choice([text, "\0\0\0\0", "//comment", "}", " " * 100_000, "\n"]),
        rng.choice(["\ufeff", " ", "[", "\ud800", "\x1b[31m"]) + text,
        rng.choice(["[]", '"a"', "1", "null", "{}", "", "NaN", "[" + text + "]"]),
        text.replace('"', "'"),
    ]
    return rng.choice(edits)


def json_deep(text: str, rng: random.Random) -> str:
    depth = rng.choice([100, 1000, 10_000, 100_000])
    left, right = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"":', "}]")])
    deep = left * depth + "1" + right * rng.choice([0, depth])
    return rng.choice(
        [deep, text.replace("{", '{"deep":' + deep + ",", 1), re.sub(r"\[\d[\d,]*\]", lambda _: deep, text, count=1)]
    )


def json_many(text: str, rng: random.Random) -> str:
    """Hundreds of tensors or axes."""
    count = rng.choice([65, 400])
    empty = ",".join(f'"{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(count))
    return rng.choice(
        [
            text.replace("{", "{" + empty + ",", 1),
            re.sub(r'(?<="shape":)\[[\d,]*\]', "[" + ",".join(["1"] * count) + "]", text, count=1),
            re.sub(r'(?<="shape":)\[[\d,]*\]', "[" + ",".join(["2147483648"] * count) + "]", text, count=1),
        ]
    )


ANY: list[Mutation] = [flip, truncate, cut_out, put_in, run_of_one, binary_length, both_ends]
NPY: list[Mutation] = [
    *(
        other_version,
        *map(on_npy_text, [npy_number, npy_number, npy_dtype, npy_dtype, npy_shape, npy_keys, npy_deep]),
    ),
]
SAFETENSORS: list[Mutation] = list(
    map(
        on_json,
        [json_number, json_number, json_dtype, json_dtype, json_names, json_names, json_text, json_deep, json_many],
    )
)


def mutate(content: bytes, suffix: str, rng: random.Random) -> tuple[bytes, str]:
    """A hostile file, and the names of what was done to it."""
    mutations = ANY + (NPY if suffix == ".npy" else SAFETENSORS)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        mutation = rng.choice(mutations)
        try:
            content = mutation(content, rng)
        except (ValueError, IndexError, AttributeError, RecursionError):
            continue  # The first one left nothing that the second could work on.
        done.append(mutation.__name__)
    return content, "+".join(done)


def bomb(path: str) -> bytes:
    """An object array in .npy that makes a folder when it is unpickled."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 2, 8, 8), }".ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + pickle.dumps(_Bomb(path))


class _Bomb:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self._path,)
