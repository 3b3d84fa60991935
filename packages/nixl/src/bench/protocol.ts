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
  z.strictObject({
    do: z.literal("fill"),
    seed: z
      .int()
      .min(0)
      .max(2 ** 31),
  }),
  z.strictObject({ do: z.literal("digest"), lengthBytes: z.int().min(1) }),
]);
export type BenchRequest = z.infer<typeof requestSchema>;

const errorSchema = z.object({
  code: z.string(),
  message: z.string(),
  hint: z.string().optional(),
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
export const replySchema = z.union([
  z.strictObject({ ok: z.unknown() }),
  z.strictObject({ error: errorSchema }),
]);

/** JSON messages over a socket, one per line. Each request gets one answer. */
export interface Channel {
  send(message: object): void;
  /**
   * Undefined when the connection has ended. Rejects with `KV_WIRE_MALFORMED` or
   * `KV_WIRE_LIMIT_EXCEEDED`.
   */
  next(): Promise<unknown>;
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
  const lines = linesOf(socket, limits.maxLineBytes);
  socket.setNoDelay(true);
  return {
    send(message) {
      socket.write(`${JSON.stringify(message)}\n`);
      if (socket.writableLength > limits.maxUnreadBytes) socket.destroy();
    },
    async next() {
      const { value, done } = await lines.next();
      if (done === true) return undefined;
      try {
        return JSON.parse(value);
      } catch (error) {
        throw KvError.from(
          error,
          "KV_WIRE_MALFORMED",
          "the other side of the benchmark sent something that is not JSON",
        );
      }
    },
    close() {
      socket.destroy();
    },
  };
}

async function* linesOf(socket: Socket, maxLineBytes: number): AsyncGenerator<string, void> {
  let rest = "";
  socket.setEncoding("utf8");
  try {
    for await (const chunk of socket as AsyncIterable<string>) {
      const parts = (rest + chunk).split("\n");
      rest = parts.pop() ?? "";
      if (rest.length > maxLineBytes || parts.some((part) => part.length > maxLineBytes)) {
        throw new KvError("KV_WIRE_LIMIT_EXCEEDED", `a line of more than ${maxLineBytes} bytes`);
      }
      yield* parts;
    }
  } catch (error) {
    if (KvError.is(error)) throw error;
    // A broken connection counts as closed.
  }
}
