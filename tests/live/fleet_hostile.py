"""A hostile worker as a separate program; the role in its provision selects its behavior.

It imports nothing of ours, so that it starts at once and can break every rule: its frames are
written to the socket by hand. Every start is a line in `<workspace>/<child id>`.
"""

import base64
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

EVENT = b'{"kind":"event","event":{"type":"token","content":"%s"}}'
FRAME_BYTES = 100 << 20
FLOOD_FRAMES = 64 << 10
STDERR_BYTES = 2 << 20


def frame(payload: bytes, opcode: int = 1) -> bytes:
    size = len(payload)
    if size < 126:
        return struct.pack(">BB", 0x80 | opcode, size) + payload
    if size < 1 << 16:
        return struct.pack(">BBH", 0x80 | opcode, 126, size) + payload
    return struct.pack(">BBQ", 0x80 | opcode, 127, size) + payload


def announce(child_id: str, fabric_dir: str, port: int) -> None:
    record = {
        "agent_id": child_id,
        "role": "",
        "endpoint": f"ws://127.0.0.1:{port}",
        "pid": os.getpid(),
        "started_at": "2026-01-01T00:00:00Z",
        "lease_expires_at": "2100-01-01T00:00:00Z",
    }
    file = Path(fabric_dir, f"{child_id}.json")
    begun = file.with_suffix(".begun")
    begun.write_text(json.dumps(record))
    begun.rename(file)


def accept(listener: socket.socket) -> socket.socket:
    """Accept the first connection and upgrade it."""
    link, _ = listener.accept()
    head = b""
    while b"\r\n\r\n" not in head:
        head += link.recv(4096)
    name = b"sec-websocket-key: "
    at = head.lower().index(name) + len(name)
    key = head[at : head.index(b"\r\n", at)]
    answer = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    link.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + answer + b"\r\n\r\n"
    )
    return link


def flood_stderr() -> None:
    block = b"x" * (1 << 20)
    for _ in range(STDERR_BYTES >> 20):
        os.write(2, block)


def misbehave(how: str, link: socket.socket) -> None:
    """Misbehave after the run has arrived."""
    link.recv(1 << 16)
    match how:
        case "hangs":
            time.sleep(1000)
        case "dies":
            os.write(2, b"a segment is at fault")
            os._exit(139)
        case "dies at work":
            link.sendall(frame(EVENT % b"so far"))
            os.write(2, b"out of luck")
            os._exit(1)
        case "garbage":
            link.sendall(frame(b'{"kind":"event","ev'))
        case "noise":
            link.sendall(b"\xff" * (1 << 16))
        case "large":
            os.write(2, b"it is large")
            link.sendall(struct.pack(">BBQ", 0x81, 127, FRAME_BYTES))
            block = b"x" * (1 << 20)
            for _ in range(FRAME_BYTES >> 20):
                link.sendall(block)
        case "fragments":
            # Each fragment is small, and the last one is never sent.
            block = struct.pack(">BBQ", 0x00, 127, 1 << 20) + b"x" * (1 << 20)
            link.sendall(frame(EVENT % b"so far"))
            link.sendall(struct.pack(">BB", 0x01, 1) + b"{")
            for _ in range(FRAME_BYTES >> 20):
                link.sendall(block)
        case "floods":
            block = frame(EVENT % (b"x" * 1000)) * 64
            for _ in range(FLOOD_FRAMES // 64):
                link.sendall(block)
            os.write(2, b"that was all")
            os._exit(1)
        case "shouts":
            flood_stderr()
            os.write(2, b"hoarse")
            os._exit(1)
        case _:
            raise SystemExit(f"no such behavior: {how}")
    time.sleep(1000)


def main() -> None:
    given = json.load(sys.stdin)
    child_id, how = given["identity"]["child_id"], given["identity"]["role"]
    with Path(given["workspace"], child_id).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if how == "is never ready":
        flood_stderr()
        os.write(2, b"no time today")
        os._exit(1)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce(child_id, given["fabric_dir"], listener.getsockname()[1])
        link = accept(listener)
        try:
            misbehave(how, link)
        except OSError:
            time.sleep(1000)  # The link is gone; stay alive anyway.


if __name__ == "__main__":
    main()
