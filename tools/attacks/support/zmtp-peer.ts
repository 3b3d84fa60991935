import { connect, type Socket } from "node:net";

/** The greeting of ZMTP 3.1 with the mechanism NULL. */
export const ZMTP_GREETING = Buffer.from(
  `ff00000000000000017f03014e554c4c${"00".repeat(48)}`,
  "hex",
);
/** A REQ's READY command. */
export const READY_OF_REQ = readyOf("REQ");
/** A ROUTER's READY command. */
export const READY_OF_ROUTER = readyOf("ROUTER");

function readyOf(socketType: string): Buffer {
  const type = Buffer.from(socketType);
  const body = Buffer.concat([
    Buffer.from("\x05READY\x0bSocket-Type\0\0\0", "latin1"),
    Buffer.from([type.length]),
    type,
    Buffer.from("\x08Identity\0\0\0\0", "latin1"),
  ]);
  return Buffer.concat([Buffer.from([4, body.length]), body]);
}

/**
 * Greets and writes `chunk` again and again, until `bytes` are sent, the peer closes the
 * connection, or the signal aborts. Returns the bytes sent.
 */
export async function pour(
  { host, port }: { readonly host: string; readonly port: number },
  chunk: Buffer,
  bytes: number,
  signal: AbortSignal,
): Promise<number> {
  const socket: Socket = connect(port, host);
  let sent = 0;
  await new Promise<void>((resolve) => {
    const write = () => {
      while (sent < bytes && !socket.destroyed) {
        sent += chunk.length;
        if (!socket.write(chunk)) return;
      }
      socket.destroy();
    };
    const abort = () => socket.destroy();
    socket
      .on("error", () => {})
      .on("close", () => {
        signal.removeEventListener("abort", abort);
        resolve();
      });
    socket.once("data", write).on("drain", write).resume();
    socket.on("connect", () => socket.write(Buffer.concat([ZMTP_GREETING, READY_OF_REQ])));
    signal.addEventListener("abort", abort);
    if (signal.aborted) abort();
  });
  return sent;
}
