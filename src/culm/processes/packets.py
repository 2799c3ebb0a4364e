"""The words between server, keeper and warden. Imported by the bare keeper, hence no JSON.

client → keeper   start <number> <descriptors>    with the channel, the command and its descriptors
                  end <number>                    kill that warden and all it holds
keeper → client   lost <number> <swept> <left>    that warden died; what it held was ended
server → keeper   connect <base>                  with a socket: one more client, a worker
                  hold <descriptors>              start a companion: the command and its descriptors
keeper → server   connected <base>
                  over <base>                     that client is gone, and all that ran for it
                  held <pid>                      a companion was started
                  unheld <pid>                    it ended
client → warden   kill <grace in ms>
warden → client   begun                           before it does anything
                  started <pid> <start ticks> <warden's pid>
                  failed <step> <errno>
                  ended <code> <signal> <swept> <lost> <left>

A client is the server, or one of its workers: its own wardens speak with it, whoever it is.
"""

import os
import socket
import struct

PACKET_BYTES_MAX = 4096
PASSED_MAX = 250  # Descriptors in one packet; the kernel takes 253.
NUMBERS = 1 << 32  # Of the orders of one client, from its base on.
LEFT_MAX = 100  # Pids named as left; more say nothing more.


class SpawnCommand:
    """What to execute, as the kernel takes it: bytes, in whatever locale."""

    __slots__ = ("argv", "cwd", "env")

    def __init__(self, argv: list[bytes], cwd: bytes, env: list[bytes]) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env  # NAME=value each.


def encode_command(command: SpawnCommand) -> bytes:
    """None of its texts may hold a NUL, nor can they for the kernel."""
    count = str(len(command.argv)).encode()
    return b"\0".join([count, command.cwd, *command.argv, *command.env])


def parse_command(body: bytes) -> SpawnCommand:
    count, cwd, *rest = body.split(b"\0")
    return SpawnCommand(rest[: int(count)], cwd, rest[int(count) :])


class CommandEnded:
    """How a command ended, in the warden's words."""

    __slots__ = ("code", "left", "lost", "signal", "swept")

    def __init__(
        self, code: int | None, signal: int | None, swept: int, left: list[int], *, lost: bool
    ) -> None:
        self.code = code
        self.signal = signal
        self.swept = swept
        self.left = left
        self.lost = lost


def encode_ended(ended: CommandEnded) -> bytes:
    code = "-" if ended.code is None else str(ended.code)
    number = "-" if ended.signal is None else str(ended.signal)
    left = encode_left(ended.left)
    return f"ended {code} {number} {ended.swept} {int(ended.lost)} {left}".encode()


def parse_ended(words: list[str]) -> CommandEnded:
    code, number, swept, lost, left = words
    return CommandEnded(
        None if code == "-" else int(code),
        None if number == "-" else int(number),
        int(swept),
        parse_left(left),
        lost=lost == "1",
    )


def encode_left(pids: list[int]) -> str:
    return ",".join(str(pid) for pid in pids[:LEFT_MAX]) or "-"


def parse_left(text: str) -> list[int]:
    return [] if text == "-" else [int(pid) for pid in text.split(",")]


def receive(channel: socket.socket) -> tuple[list[list[str]], bool]:
    """The packets that wait, and whether the other end is gone. Never waits."""
    packets: list[list[str]] = []
    resets = 0
    while resets < 2:
        try:
            packet = channel.recv(PACKET_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return packets, False
        except ConnectionResetError:
            # The other end died without reading all of ours. That is said once, and before
            # what it had sent, which follows.
            resets += 1
            continue
        if not packet:
            break
        packets.append(packet.decode().split(" "))
    return packets, True


def send(channel: socket.socket, packet: bytes) -> bool:
    """Whether it was taken; if the other end is gone, or deaf, it is not. Never waits."""
    try:
        channel.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def send_with(channel: socket.socket, packet: bytes, descriptors: list[int]) -> None:
    """Never waits. Raises OSError if it was not taken. (`socket.send_fds` ignores its flags.)"""
    passed = struct.pack(f"{len(descriptors)}i", *descriptors)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
    channel.sendmsg([packet], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_with(channel: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, which no exec inherits. Never waits; raises OSError."""
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
    """As `receive_with`: None while nothing waits, and an empty packet if the other end is gone."""
    try:
        return receive_with(channel)
    except BlockingIOError:
        return None
    except OSError:
        return b"", []


def read_all(descriptor: int) -> bytes:
    """All of a file from its beginning, wherever its writer left off."""
    parts: list[bytes] = []
    offset = 0
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
