"""Reading files whose names a user gives: devices, pipes and large files among them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from shared.files import read_bytes, read_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no such devices")


def test_a_file_without_end_is_an_error():
    for path in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(OSError, match="it is over 1 MiB") as error:
            read_bytes(Path(path), 2**20)
        assert error.value.errno == errno.EFBIG


def test_the_size_is_exact(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert read_text(file, 100) == "x" * 100
    with pytest.raises(OSError, match="it is over 99 bytes"):
        read_text(file, 99)


def test_a_pipe_is_read_to_its_end_and_without_a_writer_it_is_empty(tmp_path):
    read, write = os.pipe()
    os.write(write, b"\xef\xbb\xbfone\r\ntwo\n")
    os.close(write)
    assert read_text(Path(f"/dev/fd/{read}")) == "one\ntwo\n"
    os.close(read)
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "pipe") == b""


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
