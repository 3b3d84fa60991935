import type { Socket } from "node:net";
import { KvError } from "@kv/interface";

/** JSON messages over a socket, one a line; each is answered by one. */
export interface Channel {
  send(message: object): void;
  /** The next message; undefined when the other side has ended. Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
  next(): Promise<unknown>;
  close(): void;
}

/** Metadata in base64 is the longest thing that is said. */
const MAX_LINE_BYTES = 1 << 20;

export function channelOf(socket: Socket): Channel {
  const lines = linesOf(socket);
  socket.setNoDelay(true);
  return {
    send(message) {
      socket.write(`${JSON.stringify(message)}\n`);
    },
    async next() {
      const { value, done } = await lines.next();
      if (done === true) return undefined;
      try {
        return JSON.parse(value);
      } catch (error) {
        throw KvError.from(error, "KV_WIRE_MALFORMED", "the other side of the benchmark sent no JSON");
      }
    },
    close() {
      socket.destroy();
    },
  };
}

async function* linesOf(socket: Socket): AsyncGenerator<string, void> {
  let rest = "";
  socket.setEncoding("utf8");
  try {
    for await (const chunk of socket as AsyncIterable<string>) {
      const parts = (rest + chunk).split("\n");
      rest = parts.pop() ?? "";
      if (rest.length > MAX_LINE_BYTES || parts.some((part) => part.length > MAX_LINE_BYTES)) {
        throw new KvError("KV_WIRE_LIMIT_EXCEEDED", `a line of more than ${MAX_LINE_BYTES} bytes`);
      }
      yield* parts;
    }
  } catch (error) {
    if (KvError.is(error)) throw error;
    // A connection that breaks ends the conversation, as one that is closed does.
  }
}
