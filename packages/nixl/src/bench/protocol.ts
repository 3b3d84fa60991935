import type { Socket } from "node:net";
import { KvError } from "@kv/interface";
import { z } from "zod";

/** A request allocates memory, fills it, or hashes its beginning. */
export const requestSchema = z.discriminatedUnion("do", [
  z.strictObject({
    do: z.literal("open"),
    lengthBytes: z
      .int()
      .min(1)
      .max(2 ** 40),
    backend: z
      .string()
      .regex(/^[A-Za-z0-9_]{1,64}$/)
      .optional(),
  }),
  z.strictObject({ do: z.literal("fill") }),
  z.strictObject({ do: z.literal("digest"), lengthBytes: z.int().min(1) }),
]);
export type BenchRequest = z.infer<typeof requestSchema>;

/** Answers a request that failed. */
export const failedSchema = z.strictObject({
  error: z.object({ code: z.string(), message: z.string(), hint: z.string().optional() }),
});

/** Answers `open`. */
export const openedSchema = z.object({
  /** The agent's metadata, in base64. */
  metadata: z.base64(),
  address: z.number().int().positive(),
});
/** Answers `digest`: SHA-256 in hex. */
export const digestSchema = z.object({ sha256: z.string() });
/** Answers `fill`. */
export const doneSchema = z.object({ done: z.literal(true) });

/** JSON messages over a socket, one per line. Each request gets one answer. */
export interface Channel {
  send(message: object): void;
  /**
   * Ends with the connection. Rejects with `KV_WIRE_MALFORMED` or `KV_WIRE_LIMIT_EXCEEDED`.
   */
  readonly messages: AsyncGenerator<unknown, void>;
  close(): void;
}

export interface ChannelLimits {
  /** The longest message from the peer. */
  readonly maxLineBytes: number;
  /** The most that waits for a receiver that does not read. */
  readonly maxUnreadBytes: number;
}

/** Metadata in base64 is the longest message. */
export const INITIATOR_LIMITS: ChannelLimits = { maxLineBytes: 1 << 20, maxUnreadBytes: 1 << 20 };

/** A receiver that does not read is disconnected. */
export function channelOf(socket: Socket, limits: ChannelLimits): Channel {
  socket.setNoDelay(true);
  return {
    messages: messagesOf(socket, limits.maxLineBytes),
    send(message) {
      socket.write(`${JSON.stringify(message)}\n`);
      if (socket.writableLength > limits.maxUnreadBytes) socket.destroy();
    },
    close() {
      socket.destroy();
    },
  };
}

async function* messagesOf(socket: Socket, maxLineBytes: number): AsyncGenerator<unknown, void> {
  let rest = "";
  socket.setEncoding("utf8");
  try {
    for await (const chunk of socket as AsyncIterable<string>) {
      const parts = (rest + chunk).split("\n");
      rest = parts.pop() ?? "";
      if (rest.length > maxLineBytes || parts.some((part) => part.length > maxLineBytes)) {
        throw new KvError("KV_WIRE_LIMIT_EXCEEDED", `a line of more than ${maxLineBytes} bytes`);
      }
      for (const line of parts) yield JSON.parse(line);
    }
  } catch (error) {
    if (KvError.is(error)) throw error;
    if (error instanceof SyntaxError) {
      const message = "the other side of the benchmark sent something that is not JSON";
      throw new KvError("KV_WIRE_MALFORMED", message, { cause: error });
    }
    // A broken connection counts as closed.
  }
}
