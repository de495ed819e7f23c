"""Small files that ask for much: each a few bytes to a megabyte, made of the words that a format allows.

`MAKERS` has them by name; each writes into an empty folder and gives what a person would open. Somebody who reads them
within their budget answers in a second or two; somebody who believes them never does, or takes gigabytes.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

Maker = Callable[[Path], Path]
MAKERS: dict[str, Maker] = {}


def maker(function: Maker) -> Maker:
    MAKERS[function.__name__] = function
    return function


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _pickle(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _calls(module: str, name: str, argument: bytes, arguments: bytes, times: int) -> bytes:
    """A list of so many calls of a global with the same argument, which stands in the memo."""
    head = argument + b"r\x00\x01\x00\x000" + _global(module, name) + b"r\x01\x01\x00\x000"
    return _pickle(head, b"](" + (b"j\x01\x01\x00\x00" + arguments + b"R") * times + b"e")


_GET = b"j\x00\x01\x00\x00"


@maker
def list_called_with_one_list_again_and_again(folder: Path) -> Path:
    numbers = b"](" + b"K\x01" * 100_000 + b"e"
    return _file(folder, "x.pkl", _calls("builtins", "list", numbers, _GET + b"\x85", 40_000))


@maker
def a_table_one_cell_of_which_never_ends(folder: Path) -> Path:
    return _file(folder, "metrics.csv", b"step,loss\n1,.5\n" + b'"' * 900_001)


@maker
def tuple_set_size_and_deque_of_one_list(folder: Path) -> Path:
    numbers = b"](" + b"K\x01" * 100_000 + b"e"
    return _file(folder, "x.pkl", _calls("torch", "Size", numbers, _GET + b"\x85", 40_000))


@maker
def dictionaries_of_one_dictionary(folder: Path) -> Path:
    pairs = b"}(" + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(60_000)) + b"u"
    return _file(folder, "x.pkl", _calls("collections", "OrderedDict", pairs, _GET + b"\x85", 40_000))


@maker
def encode_called_with_one_text(folder: Path) -> Path:
    return _file(
        folder, "x.pkl", _calls("_codecs", "encode", _text("a" * 200_000), _GET + _text("latin1") + b"\x86", 30_000)
    )


@maker
def paths_of_one_text(folder: Path) -> Path:
    return _file(
        folder, "x.pkl", _calls("pathlib", "PurePosixPath", _text("a" * 200_000), _GET + _GET + b"\x86", 30_000)
    )


@maker
def devices_of_one_text(folder: Path) -> Path:
    return _file(folder, "x.pkl", _calls("torch", "device", _text("a" * 200_000), _GET + b"\x85", 30_000))


@maker
def bytearrays_of_one_text(folder: Path) -> Path:
    arguments = _GET + _text("latin-1") + b"\x86"
    return _file(folder, "x.pkl", _calls("builtins", "bytearray", _text("a" * 200_000), arguments, 30_000))


@maker
def meta_tensors_of_one_long_size(folder: Path) -> Path:
    numbers = b"](" + b"K\x01" * 100_000 + b"e"
    arguments = _global("torch", "float32") + _GET + b"\x86"
    return _file(folder, "x.pkl", _calls("torch._utils", "_rebuild_meta_tensor_no_storage", numbers, arguments, 12_000))


@maker
def text_arrays_of_the_same_bytes(folder: Path) -> Path:
    kind = _global("numpy", "dtype") + _text("U1") + b"\x89\x88\x87R"
    data = b"B" + struct.pack("<I", 400_000) + b"a\0\0\0" * 100_000
    one = _GET + kind + b"J" + struct.pack("<i", 100_000) + b"\x85" + _text("C") + b"t"
    call = _global("numpy.core.numeric", "_frombuffer") + b"(" + one + b"R"
    return _file(folder, "x.pkl", _pickle(data, b"r\x00\x01\x00\x000", b"](" + call * 3_000 + b"e"))


@maker
def object_arrays_of_one_list(folder: Path) -> Path:
    numbers = b"](" + b"N" * 100_000 + b"e"
    kind = _global("numpy", "dtype") + _text("O8") + b"\x89\x88\x87R"
    one = _GET + kind + b"J" + struct.pack("<i", 50_000) + b"K\x02\x86" + _text("C") + b"t"
    call = _global("numpy.core.numeric", "_frombuffer") + b"(" + one + b"R"
    return _file(folder, "x.pkl", _pickle(numbers, b"r\x00\x01\x00\x000", b"](" + call * 3_000 + b"e"))


@maker
def consolidated_leaves_again_and_again(folder: Path) -> Path:
    meta: dict[str, Any] = {"non_tensors": {}, "leaves": {str(i): ("torch.uint8", (1,), 0, 1, 0) for i in range(40)}}
    for _ in range(7):
        meta = {"non_tensors": {}, "leaves": {}, **{f"k{i}": meta for i in range(12)}}
    return _file(folder, "x.pkl", _consolidated(meta))


def _consolidated(meta: dict[str, Any]) -> bytes:
    body = pickle.dumps((meta, torch.zeros(8, dtype=torch.uint8)), 2)
    return b"\x80\x02ctensordict._reductions\n_rebuild_tensordict_files_consolidated\n" + body[2:-1] + b"R."


@maker
def keys_that_are_one_long_tuple(folder: Path) -> Path:
    key = b"(" + b"K\x01" * 300_000 + b"tr\x00\x01\x00\x000"
    return _file(folder, "x.pkl", _pickle(key, b"}" + (_GET + b"Ns") * 9_000))


@maker
def a_megabyte_of_empty_sets(folder: Path) -> Path:
    return _file(folder, "x.pkl", _pickle(b"](" + b"\x8f" * 1_000_000 + b"e"))


@maker
def a_megabyte_of_lists(folder: Path) -> Path:
    return _file(folder, "x.pkl", _pickle(b"](" + b"]\x94Na" * 250_000 + b"e"))


@maker
def a_megabyte_of_empty_bytes(folder: Path) -> Path:
    return _file(folder, "x.pkl", _pickle(b"](" + b"C\x00" * 500_000 + b"e"))


@maker
def a_structure_that_unfolds(folder: Path) -> Path:
    value: list[Any] = [0.5] * 1000
    for _ in range(3):
        value = [value] * 40
    return _file(folder, "x.pkl", pickle.dumps({"tokens": value}))


@maker
def rows_that_are_one_row(folder: Path) -> Path:
    row = [1] * 100_000
    return _file(folder, "x.pkl", pickle.dumps({"input_ids": [row] * 100_000}))


@maker
def a_column_of_one_long_text(folder: Path) -> Path:
    text = "a" * 300_000
    return _file(folder, "x.pkl", pickle.dumps({"text": [text] * 120_000, "texts": [text, None] * 60_000}))


@maker
def very_many_fields_of_one_long_text(folder: Path) -> Path:
    text = "a" * 300_000
    return _file(folder, "x.pkl", pickle.dumps({f"k{i}": text for i in range(30_000)}))


@maker
def one_conversation_again_and_again(folder: Path) -> Path:
    turns = [{"role": "user", "content": "a" * 1000}] * 100
    return _file(folder, "x.pkl", pickle.dumps({"messages": [turns] * 100_000}))


@maker
def a_step_that_spaces_follow(folder: Path) -> Path:
    return _file(folder, "metrics.jsonl", b'{"step":1,"loss":1}\n{"step":' + b" " * 900_000 + b"}\n")


@maker
def samples_of_a_column_each(folder: Path) -> Path:
    return _file(folder, "x.pkl", pickle.dumps([{f"k{i}": 1} for i in range(40_000)]))


@maker
def tensors_of_one_storage_ten_thousand_times(folder: Path) -> Path:
    data = torch.zeros(200_000)
    buffer = io.BytesIO()
    torch.save({f"layer.{i}.weight": data for i in range(4_000)}, buffer)
    return _file(folder, "x.pt", buffer.getvalue())


@maker
def a_column_of_one_tensor_again_and_again(folder: Path) -> Path:
    data = torch.zeros(200_000)
    buffer = io.BytesIO()
    torch.save([{"input_ids": data} for _ in range(20_000)], buffer)
    return _file(folder, "x.pt", buffer.getvalue())


def _saved(tensors: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


@maker
def stride_nought(folder: Path) -> Path:
    ids = torch.zeros(1, dtype=torch.int64).expand(10**6, 10**6)
    return _file(folder, "x.pt", _saved({"input_ids": ids, "whole": torch.ones(3)}))


@maker
def strides_that_overlap(folder: Path) -> Path:
    overlapping = torch.zeros(4000).as_strided((1000, 1000, 1000), (1, 1, 1))
    return _file(folder, "x.pt", _saved({"h": overlapping, "whole": torch.ones(3)}))


@maker
def rows_without_an_element(folder: Path) -> Path:
    return _file(folder, "x.pt", _saved({"input_ids": torch.empty(2**40, 0), "rewards": torch.ones(3)}))


@maker
def rows_without_an_element_in_safetensors(folder: Path) -> Path:
    header = json.dumps({"input_ids": {"dtype": "I64", "shape": [2**40, 0], "data_offsets": [0, 0]}}).encode()
    return _file(folder, "x.safetensors", struct.pack("<Q", len(header)) + header)


@maker
def rows_without_an_element_in_numpy(folder: Path) -> Path:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((3, 0)))
    data = buffer.getvalue().replace(b"(3, 0), }" + b" " * 13, b"(1099511627776, 0), }  "[:22].ljust(22))
    return _file(folder, "x.npy", data)


@maker
def a_million_rows_of_one_stored_element(folder: Path) -> Path:
    ids = torch.zeros(1, dtype=torch.int64).expand(2**20, 1)
    return _file(folder, "x.pt", _saved({"input_ids": ids, "logprobs": torch.zeros(1).expand(2**20, 1)}))


@maker
def an_npz_that_inflates(folder: Path) -> Path:
    path = folder / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(8):
            with archive.open(f"a{number}.npy", "w") as file:
                np.lib.format.write_array_header_1_0(
                    file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 24,)}
                )
                for _ in range(64):
                    file.write(bytes(1 << 20))
    return path


@maker
def a_column_for_every_line(folder: Path) -> Path:
    return _file(folder, "x.jsonl", b"".join(b'{"k%d":1}\n' % i for i in range(20_000)))


@maker
def nested_columns_for_every_line(folder: Path) -> Path:
    return _file(folder, "x.jsonl", b"".join(b'{"a":{"b":{"k%d":[1]}}}\n' % i for i in range(20_000)))


@maker
def metric_lines_without_end(folder: Path) -> Path:
    return _file(folder, "metrics.jsonl", b"".join(b'{"step":%d,"loss":1}\n' % i for i in range(30_000)))


@maker
def metric_rows_of_one_document(folder: Path) -> Path:
    rows = [{"step": i, "loss": 0.5} for i in range(30_000)]
    return _file(folder, "trainer_state.json", json.dumps({"log_history": rows}).encode())


@maker
def rollout_lines_of_a_step_each(folder: Path) -> Path:
    lines = b"".join(b'{"step":%d,"input":"a","output":"b","score":1.0,"gts":"c"}\n' % i for i in range(15_000))
    return _file(folder, "rollouts/1.jsonl", lines)


@maker
def a_parquet_of_one_value(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "completions_1.parquet"
    pq.write_table(pa.table({f"c{i}": pa.array([1] * 4_000_000) for i in range(8)}), path, compression="zstd")
    return path


@maker
def a_parquet_of_one_long_text(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "completions_1.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4_000_000, pa.int32()), pa.array(["a" * 400_000]))
    pq.write_table(pa.table({"completion": texts}), path, compression="zstd")
    return path


@maker
def a_msgpack_of_lists(folder: Path) -> Path:
    data = msgspec.msgpack.encode([[[] for _ in range(900_000)]])
    return _file(folder, "rollouts/step_1/rank_0.bin", data)


@maker
def a_msgpack_of_very_many_batches(folder: Path) -> Path:
    batch = [[1], [True], [0.0], [0.0], [0], [1], [1.0]]
    return _file(folder, "rollouts/step_1/rank_0.bin", msgspec.msgpack.encode([batch] * 10_000)).parents[2]


@maker
def a_token_export_of_one_token_each(folder: Path) -> Path:
    line = b'{"micro_step":%d,"token_ids":[1],"trainer_logprobs":[0.5]}\n'
    return _file(folder, "token_exports/step_1/rank_0.jsonl", b"".join(line % i for i in range(12_000))).parents[2]


@maker
def a_log_of_nothing_but_nan(folder: Path) -> Path:
    lines = b"".join(b'{"step":%d,"loss":NaN,"kl":NaN}\n' % i for i in range(25_000))
    return _file(folder, "metrics.jsonl", lines)


@maker
def a_line_of_very_many_metrics(folder: Path) -> Path:
    metrics = b",".join(b'"k%d":1.0' % i for i in range(60_000))
    return _file(folder, "metrics.jsonl", b'{"step":1,' + metrics + b"}\n")


@maker
def a_wandb_file_that_ends_inside_a_blocks_filling(folder: Path) -> Path:
    size = (1 << 15) - 7 - 7 - 3
    record = struct.pack("<IHB", 0, size, 1) + b"\x0a" + _varint(size - 4) + bytes(size - 4)
    return _file(folder, "run-x.wandb", b":W&B\x00\x00\x00" + record)


@maker
def a_wandb_record_of_empty_parts(folder: Path) -> Path:
    head = struct.pack("<IHB", 0, 0, 2)
    part = struct.pack("<IHB", 0, 0, 3)
    data = b":W&B\x00\x00\x00" + head
    while len(data) < 900_000:
        left = (1 << 15) - len(data) % (1 << 15)
        data += bytes(left) if left < 7 else part * (left // 7)
    return _file(folder, "run-x.wandb", data)


@maker
def a_msgpack_that_claims_lists_of_lists(folder: Path) -> Path:
    return _file(folder, "rollouts/step_1/rank_0.bin", b"\xdd\x00\x01\x00\x00" * 180_000).parents[2]


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


@maker
def event_scalars_of_a_step_each(folder: Path) -> Path:
    def record(message: bytes) -> bytes:
        return struct.pack("<Q", len(message)) + bytes(4) + message + bytes(4)

    def scalar(step: int) -> bytes:
        value = b"\x0a\x04loss" + b"\x15" + struct.pack("<f", 1.0)
        summary = b"\x0a" + _varint(len(value)) + value
        return b"\x10" + _varint(step) + b"\x2a" + _varint(len(summary)) + summary

    version = record(b"\x1a\x0dbrain.Event:2")
    return _file(folder, "events.out.tfevents.1", version + b"".join(record(scalar(i)) for i in range(20_000)))


@maker
def a_log_of_carriage_returns(folder: Path) -> Path:
    return _file(folder, "train.log", b"{'loss': 0.5}\n" + b"\r" * 900_000 + b"\n")


@maker
def a_log_of_errors(folder: Path) -> Path:
    return _file(folder, "train.log", b"{'loss': 0.5}\n" + b"ValueError: x\n" * 60_000)


@maker
def a_log_of_iterations(folder: Path) -> Path:
    lines = b"".join(b"[Micro 0] 1. Loss: pg_loss=1\niter %d: loss 0.5, time 1ms\n" % i for i in range(15_000))
    return _file(folder, "train.log", lines)


@maker
def a_log_of_one_step_and_another_name_in_every_line(folder: Path) -> Path:
    lines = b"".join(b"step:1 - loss%d:1.0\n" % i for i in range(45_000))
    return _file(folder, "train.log", b"step:1 - loss:1.0\n" + lines)


@maker
def a_log_of_open_braces(folder: Path) -> Path:
    return _file(
        folder, "train.log", b"{'loss': 0.5}\n" + (b"{'" * 30_000 + b"':\n") * 12 + b"step:1 " + b" - a" * 200_000
    )


@maker
def a_log_of_spaces_and_words(folder: Path) -> Path:
    lines = b"step 1 |" + b"a b " * 15_000 + b"\n" + b"step: 1 " + b"loss:  " * 9_000 + b"\n" + b"a" * 65_000 + b"=\n"
    return _file(folder, "train.log", b"{'loss': 0.5}\n" + lines * 6)


@maker
def a_pipe_as_the_index(folder: Path) -> Path:
    _native(folder)
    os.mkfifo(folder / "index_rank0.jsonl")
    return folder


@maker
def a_device_as_the_index(folder: Path) -> Path:
    _native(folder)
    (folder / "index_rank0.jsonl").symlink_to("/dev/zero")
    return folder


@maker
def a_pipe_as_a_record(folder: Path) -> Path:
    _native(folder)
    os.mkfifo(folder / "step_000001.pt")
    return folder


def _native(folder: Path, *lines: dict[str, Any]) -> None:
    manifest = {"format": "rldbg-dump", "schema_version": 1, "models": {}, "flags": {}}
    _file(folder, "manifest.json", json.dumps(manifest).encode())
    _file(folder, "forward_data/step_000000.pt", _saved({"logprobs": torch.zeros(2, 3)}))
    if lines:
        _file(folder, "index_rank0.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))


_KEY = {"step": 3, "rank": 0, "micro": 0, "role": "actor", "stage": "forward_data"}


@maker
def an_index_line_with_a_nul(folder: Path) -> Path:
    _native(folder, {"key": _KEY, "file": "a\0b.pt", "fields": []})
    return folder


@maker
def an_index_line_of_strange_shapes(folder: Path) -> Path:
    fields = [{"name": f"f{i}", "dtype": dtype, "shape": shape, "digest": "x"} for i, (dtype, shape) in enumerate([
        ("float32", [-5]), ("int64", [2**70]), ("int64", [2**40, 0]), ("nothing", [10**400]), ("float32", [1] * 100),
    ])]  # fmt: skip
    _native(folder, *({"key": {**_KEY, "micro": i}, "file": None, "fields": [one]} for i, one in enumerate(fields)))
    return folder


@maker
def index_numbers_of_four_hundred_digits(folder: Path) -> Path:
    long = 10**400
    value = {"name": "loss", "dtype": "float", "shape": None, "value": long}
    stats = {"name": "x", "dtype": "float32", "shape": [2], "stats": {"min": long, "max": [long], "mean": {}}}
    _native(
        folder,
        {"key": {**_KEY, "step": long}, "file": None, "fields": [value]},
        {"key": _KEY, "file": None, "fields": [value, stats, {**value, "dtype": "int"}]},
    )
    return folder


@maker
def a_jsonl_record_of_ints_that_are_infinite(folder: Path) -> Path:
    _native(folder)
    record = {"a": ["inf", 1], "b": 2, "__tensors__": {"a": {"dtype": "int64", "shape": [2]}}}
    _file(folder, "forward_data/step_000001.jsonl", json.dumps(record).encode())
    return folder / "forward_data/step_000001.jsonl"


@maker
def a_jsonl_record_of_numbers_too_long(folder: Path) -> Path:
    _native(folder)
    record = {"a": [10**400, 1], "b": 10**30, "c": [[10**400]], "__tensors__": {"a": {"dtype": "int32", "shape": [2]}}}
    _file(folder, "forward_data/step_000001.jsonl", json.dumps(record).encode())
    return folder


@maker
def manifests_of_anything(folder: Path) -> Path:
    _native(folder)
    manifest = {
        "format": "rldbg-dump",
        "schema_version": 1,
        "models": {"9" * 5000: "x", "*": "\0"},
        "flags": {"\ud800": 10**400},
        "facts": {"lost": [{"key": [1], "why": {}}]},
        "incidents": [{"step": 1}],
    }
    _file(folder, "manifest.json", json.dumps(manifest).encode())
    return folder


@maker
def a_manifest_nested_without_end(folder: Path) -> Path:
    _native(folder)
    flags: dict[str, Any] = {}
    for _ in range(600):
        flags = {"effective": flags}
    manifest = {"format": "rldbg-dump", "schema_version": 1, "models": {}, "flags": flags}
    _file(folder, "manifest.json", json.dumps(manifest).encode())
    return folder


@maker
def a_manifest_of_very_many_models(folder: Path) -> Path:
    _native(folder)
    models = {str(step): f"../weights/{step}" for step in range(20_000)}
    manifest = {"format": "rldbg-dump", "schema_version": 1, "models": models, "flags": {}}
    _file(folder, "manifest.json", json.dumps(manifest).encode())
    return folder


@maker
def an_index_of_broken_lines(folder: Path) -> Path:
    _native(folder)
    _file(folder, "index_rank0.jsonl", b"{\n" * 200_000)
    return folder


@maker
def numbers_of_four_hundred_digits_in_rows(folder: Path) -> Path:
    rows = [{"step": 1, "loss": 10**400, "ids": [10**400, 2], "t": "x"}, {"step": 10**400, "loss": None, "ids": [1]}]
    return _file(folder, "metrics.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@maker
def numbers_of_four_hundred_digits_in_a_pickle(folder: Path) -> Path:
    return _file(folder, "x.pkl", pickle.dumps({"loss": 10**400, "ids": [10**400, 1], "step": 10**400, 10**400: 1}))


@maker
def bytes_where_texts_are_expected(folder: Path) -> Path:
    tree = {"a": [b"x", "y", 1], b"k": {b"\xff": [b"\xff" * 3]}, "c": [{b"k": b"v"}, {"k": [b"\0"]}], "d": {1, b"x"}}
    return _file(folder, "x.pkl", pickle.dumps(tree))


@maker
def bytes_in_a_msgpack(folder: Path) -> Path:
    rows = [[b"a", [b"\xff"], {b"k": b"v"}, 1], [b"a", [b"\xff"], {b"k": b"v"}, 1]]
    return _file(folder, "x.bin", msgspec.msgpack.encode(rows))


@maker
def lone_surrogates(folder: Path) -> Path:
    tree = {"\ud800name": torch.ones(2), "text": "a\udc80b", "words": ["\udfff", "x"]}
    return _file(folder, "x.pkl", pickle.dumps(tree))


@maker
def a_sparse_file_of_twenty_gigabytes(folder: Path) -> Path:
    """A zip whose data.pkl claims twenty gigabytes, and stops after three bytes."""
    path, size = folder / "x.pt", 20 << 30
    name = b"archive/data.pkl"
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 20)
    wide = struct.pack("<HHQQ", 1, 16, size, size)
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 20,
                        0, 0, 0, 0, 0)  # fmt: skip
    start = len(local) + len(name) + len(wide) + size
    directory = entry + name + wide
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), 0xFFFFFFFF, 0)
    with open(path, "wb") as file:
        file.write(local + name + wide + b"\x80\x02}.")
        file.seek(start)
        file.write(directory + end64 + locator + end)
    return path


@maker
def a_sparse_line_of_twenty_gigabytes(folder: Path) -> Path:
    path = folder / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step": 1, "loss": 0.5}\n{"a": ')
        file.truncate(20 << 30)
    return path


@maker
def a_sparse_log_of_twenty_gigabytes(folder: Path) -> Path:
    path = folder / "train.log"
    with open(path, "wb") as file:
        file.write(b"{'loss': 0.5}\n")
        file.truncate(20 << 30)
    return path


@maker
def a_document_nested_without_end(folder: Path) -> Path:
    head = b'{"schema_version": 1, "kind": "comparison", "tool": "rldbg", "a": '
    return _file(folder, "x.json", head + b"[" * 200_000 + b"]" * 200_000 + b"}")


@maker
def a_json_of_brackets(folder: Path) -> Path:
    return _file(folder, "x.jsonl", (b"[" * 450_000 + b"]" * 450_000) + b"\n" + b'{"a":1}\n')


@maker
def a_numpy_header_of_brackets(folder: Path) -> Path:
    header = b"(" * 4000 + b")" * 4000
    return _file(folder, "x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


@maker
def a_zip_of_very_many_records(folder: Path) -> Path:
    path = folder / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        head = io.BytesIO()
        np.save(head, np.zeros(0, dtype=object))
        for number in range(6_000):
            archive.writestr(f"a{number}.npy", head.getvalue())
    return path


@maker
def a_tokenizer_of_anything(folder: Path) -> Path:
    _file(folder, "tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": ' + b"[" * 100_000)
    return _file(folder, "x.pt", _saved({"input_ids": torch.arange(12).reshape(3, 4), "logprobs": torch.zeros(3, 4)}))


@maker
def a_tokenizer_that_expands(folder: Path) -> Path:
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}] * 8},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }  # fmt: skip
    _file(folder, "tokenizer.json", json.dumps(tokenizer).encode())
    ids = torch.zeros(3, 4, dtype=torch.int64)
    return _file(folder, "x.pt", _saved({"input_ids": ids, "logprobs": torch.zeros(3, 4)}))


@maker
def a_tokenizer_that_panics(folder: Path) -> Path:
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }  # fmt: skip
    _file(folder, "tokenizer.json", json.dumps(tokenizer).encode())
    ids = torch.zeros(3, 4, dtype=torch.int64)
    return _file(folder, "x.pt", _saved({"input_ids": ids, "logprobs": torch.zeros(3, 4)}))


@maker
def zlib_text_that_is_no_archive(folder: Path) -> Path:
    return _file(folder, "x.npz", b"PK\x03\x04" + bytes(22) + struct.pack("<HH", 5, 0) + b"a.npy" + zlib.compress(b"x"))


@maker
def an_index_of_weights_of_very_many_files(folder: Path) -> Path:
    places = {f"w{i}": f"s{i}" for i in range(30_000)}
    _file(folder, "model.safetensors.index.json", json.dumps({"weight_map": places}).encode())
    return folder


@maker
def shards_that_are_links_to_one_file(folder: Path) -> Path:
    from safetensors.numpy import save

    first = _file(folder, "s0.safetensors", save({f"w{i}": np.zeros(2, np.float32) for i in range(2_500)}))
    for number in range(1, 400):
        os.link(first, folder / f"s{number}.safetensors")
    places = {f"w{i}": f"s{i % 400}.safetensors" for i in range(2_500)}
    _file(folder, "model.safetensors.index.json", json.dumps({"weight_map": places}).encode())
    return folder


@maker
def a_record_of_very_many_numbers(folder: Path) -> Path:
    fields = {f"k{i}": i * 0.5 for i in range(18_000)}
    return _file(folder, "x.jsonl", json.dumps({"step": 1, **fields}).encode())


@maker
def a_distributed_checkpoint_of_one_piece_again_and_again(folder: Path) -> Path:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )  # fmt: skip

    def at(place: int) -> torch.Size:
        return torch.Size([place])

    held = io.BytesIO()
    torch.save(torch.zeros(1), held)
    chunks = [ChunkStorageMetadata(at(i), at(1)) for i in range(2000)]
    tensors: Any = {"w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), at(2000), chunks)}
    one = _StorageInfo("__0_0.distcp", 0, len(held.getvalue()))
    places: Any = {MetadataIndex("w", at(i)): one for i in range(2000)}
    _file(folder, "__0_0.distcp", held.getvalue())
    _file(folder, ".metadata", pickle.dumps(Metadata(tensors, None, places)))
    return folder


@maker
def many_tensors_that_overlap_themselves(folder: Path) -> Path:
    few = torch.arange(4096.0)
    torch.save({f"h{i}": few.as_strided((1000, 1000), (1, 1), i) for i in range(500)}, folder / "x.pt")
    return folder / "x.pt"
