"""Runs on a machine without a network: forwards a port of its loopback to the gateway's socket. It prints the port.

python3 forwarder.py /run/treetune/gateway.sock
"""

import asyncio
import os
import socket
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        theirs, to_them = await asyncio.open_unix_connection(sys.argv[1])
        await asyncio.gather(copy(reader, to_them), copy(theirs, writer))
        to_them.close()
    except OSError:
        pass
    writer.close()


async def serve(listening: socket.socket) -> None:
    server = await asyncio.start_server(forward, sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listening.getsockname()[1], flush=True)
    if os.fork() == 0:  # the caller goes on when the port is open
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        asyncio.run(serve(listening))
