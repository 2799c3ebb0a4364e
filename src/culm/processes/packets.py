"""Packets between server, supervisor and shim. The bare supervisor imports this: no JSON.

client → supervisor   start <number> <descriptors>  with the channel, the command, its descriptors
                      end <number>                  kill that shim and its process tree
supervisor → client   lost <number> <swept> <left>  the shim died; its process tree was killed
server → supervisor   connect <base>                with a socket: one more client, a worker
                      hold <descriptors>            start a sidecar: command and descriptors
supervisor → server   connected <base>
                      over <base>                   that client and all its commands are gone
                      held <pid>                    a sidecar was started
                      unheld <pid>                  the sidecar ended
client → shim         kill <grace in ms>
shim → client         begun                         before it does anything
                      started <pid> <start ticks> <shim's pid>
                      failed <step> <errno>
                      ended <code> <signal> <swept> <lost> <left>

A client is the server or one of its workers; the shims of a client talk to it directly.
"""

import os
import socket
import struct

PACKET_BYTES_MAX = 4096
PASSED_MAX = 250  # Descriptors in one packet; the kernel allows 253.
NUMBERS = 1 << 32  # Requests of one client are numbered from its base on.
LEFT_MAX = 100  # Pids listed as left; a longer list would add nothing.


class SpawnCommand:
    """A command in the kernel's terms: bytes, independent of the locale."""

    __slots__ = ("argv", "cwd", "env", "files")

    def __init__(self, argv: list[bytes], cwd: bytes, env: list[bytes], files: int) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env  # One NAME=value per entry.
        self.files = files  # Its soft limit on open files.


def encode_command(command: SpawnCommand) -> bytes:
    """Encode a command, none of whose texts may contain a NUL."""
    count = str(len(command.argv)).encode()
    files = str(command.files).encode()
    return b"\0".join([count, files, command.cwd, *command.argv, *command.env])


def parse_command(body: bytes) -> SpawnCommand:
    count, files, cwd, *rest = body.split(b"\0")
    return SpawnCommand(rest[: int(count)], cwd, rest[int(count) :], int(files))


def encode_ended(
    code: int | None, signal: int | None, swept: int, left: list[int], *, lost: bool
) -> bytes:
    """Encode the end of a command as its shim reports it."""
    numbers = " ".join("-" if number is None else str(number) for number in (code, signal))
    return f"ended {numbers} {swept} {int(lost)} {encode_left(left)}".encode()


def parse_ended(fields: list[str]) -> tuple[int | None, int | None, int, list[int], bool]:
    """Return the exit code, the signal, the swept and the left processes, and `lost`."""
    code, signal = (None if number == "-" else int(number) for number in fields[:2])
    swept, lost, left = fields[2:]
    return code, signal, int(swept), parse_left(left), lost == "1"


def encode_left(pids: list[int]) -> str:
    return ",".join(str(pid) for pid in pids[:LEFT_MAX]) or "-"


def parse_left(text: str) -> list[int]:
    return [] if text == "-" else [int(pid) for pid in text.split(",")]


def receive(channel: socket.socket) -> tuple[list[list[str]], bool]:
    """Return the packets that wait, and whether the other end is gone. Never waits."""
    packets: list[list[str]] = []
    resets = 0
    while resets < 2:
        try:
            packet = channel.recv(PACKET_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return packets, False
        except ConnectionResetError:
            # The other end died without reading all of our packets. The kernel reports this once,
            # before the packets that the other end had sent.
            resets += 1
            continue
        if not packet:
            break
        packets.append(packet.decode().split(" "))
    return packets, True


def send(channel: socket.socket, packet: bytes) -> bool:
    """Send one packet; return False if the peer is gone or its queue is full. Never waits."""
    try:
        channel.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def send_with(channel: socket.socket, packet: bytes, descriptors: list[int]) -> None:
    """Send a packet with descriptors; raises OSError on failure. Never waits.

    (`socket.send_fds` ignores its flags.)
    """
    passed = struct.pack(f"{len(descriptors)}i", *descriptors)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
    channel.sendmsg([packet], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_with(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet and its close-on-exec descriptors. Never waits; raises OSError."""
    size = struct.calcsize("i")
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    packet, rights, _, _ = channel.recvmsg(
        PACKET_BYTES_MAX, socket.CMSG_SPACE(PASSED_MAX * size), flags
    )
    descriptors: list[int] = []
    for level, kind, passed in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(passed) // size
            descriptors += struct.unpack(f"{count}i", passed[: count * size])
    return packet, descriptors


def receive_or_end(channel: socket.socket) -> tuple[bytes, list[int]] | None:
    """As `receive_with`, but None if no packet waits and an empty packet at the end."""
    try:
        return receive_with(channel)
    except BlockingIOError:
        return None
    except OSError:
        return b"", []


def read_all(descriptor: int) -> bytes:
    """Read a whole file from its beginning, regardless of the current offset."""
    parts: list[bytes] = []
    offset = 0
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
