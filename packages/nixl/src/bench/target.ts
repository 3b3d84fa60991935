import { once } from "node:events";
import { createServer, type Socket } from "node:net";
import { type Agent, KvError, type KvErrorCode, type Memory, type Transport } from "@kv/interface";
import { sendToOwner } from "@kv/program";
import { nixlTransport } from "../transport.js";
import { digest, fill } from "./pattern.js";
import { type BenchRequest, channelOf, requestSchema } from "./protocol.js";

export interface BenchTarget {
  readonly host: string;
  readonly port: number;
  close(): Promise<void>;
}

export interface BenchTargetOptions {
  readonly host: string;
  /** 0 for a free port. */
  readonly port: number;
  /** The most memory of a session. */
  readonly maxBytes: number;
  /** Default: `DEFAULT_TARGET_LIMITS`. */
  readonly limits?: Partial<TargetLimits> | undefined;
  /** Gets a line when an initiator connects, and one when it is done. */
  readonly onSession?: ((line: string) => void) | undefined;
}

/** Limits against initiators. Exceeding one ends the session. */
export interface TargetLimits {
  /** The longest request. */
  readonly maxLineBytes: number;
  /** The most that waits for an initiator that does not read. */
  readonly maxUnreadBytes: number;
  /** From the connection to the first whole request, in ms. */
  readonly firstRequestMs: number;
  /** Between requests, in ms: transfers take place in between. */
  readonly idleMs: number;
}

export const DEFAULT_TARGET_LIMITS: TargetLimits = {
  maxLineBytes: 4096,
  maxUnreadBytes: 64 << 10,
  firstRequestMs: 10_000,
  idleMs: 900_000,
};

/**
 * Takes one session at a time: two would measure each other. Rejects with
 * `KV_SIDE_CHANNEL_BIND_FAILED`.
 */
export async function listenAsTarget(options: BenchTargetOptions): Promise<BenchTarget> {
  const { host, port, maxBytes, onSession = () => {} } = options;
  const limits = { ...DEFAULT_TARGET_LIMITS, ...options.limits };
  const transport = nixlTransport();
  let running: { readonly socket: Socket; readonly ended: Promise<void> } | undefined;
  const server = createServer((socket) => {
    if (running !== undefined && !running.socket.destroyed) {
      refuse(socket, "another benchmark uses this target");
      return;
    }
    const from = `${socket.remoteAddress}:${socket.remotePort}`;
    onSession(`${from} connected`);
    const ended = Promise.resolve(running?.ended)
      .then(() => serve(socket, transport, maxBytes, limits))
      .then(
        () => onSession(`${from} is done`),
        (error: unknown) => onSession(`${from}: ${(error as Error).message}`),
      );
    running = { socket, ended };
  });
  server.listen(port, host);
  await once(server, "listening").catch((error: Error) => {
    throw new KvError(
      "KV_SIDE_CHANNEL_BIND_FAILED",
      `cannot listen on ${host}:${port}: ${error.message}`,
      { hint: "use another port, or end the program that listens there" },
    );
  });
  const address = server.address();
  return {
    host,
    port: typeof address === "object" && address !== null ? address.port : port,
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      running?.socket.destroy();
      await Promise.all([closed, running?.ended]);
      await transport.close();
    },
  };
}

function refuse(socket: Socket, message: string): void {
  socket.on("error", () => {});
  const error = { code: "KV_REQUEST_INVALID" satisfies KvErrorCode, message };
  socket.end(`${JSON.stringify({ error })}\n`, () => socket.destroy());
}

async function serve(
  socket: Socket,
  transport: Transport,
  maxBytes: number,
  limits: TargetLimits,
): Promise<void> {
  const channel = channelOf(socket, limits);
  let agent: Agent | undefined;
  let memory: Memory | undefined;

  async function answer(request: BenchRequest): Promise<object> {
    if (request.do === "open") {
      if (memory !== undefined)
        throw new KvError("KV_REQUEST_INVALID", "this session has allocated its memory already");
      const { backend, lengthBytes } = request;
      if (lengthBytes > maxBytes) {
        throw new KvError(
          "KV_REQUEST_INVALID",
          `${lengthBytes} bytes were requested, but this target allocates ${maxBytes} at most`,
          { hint: "raise --max-bytes at the target, or ask for smaller --sizes" },
        );
      }
      await agent?.close();
      const backends = backend === undefined ? undefined : [{ name: backend }];
      agent = await transport.createAgent({ backends });
      memory = transport.allocate(lengthBytes);
      await agent.register(memory);
      const metadata = await agent.localMetadata();
      return { metadata: Buffer.from(metadata).toString("base64"), address: memory.address };
    }
    if (memory === undefined) throw new KvError("KV_REQUEST_INVALID", "a session begins with open");
    if (request.do === "fill") {
      fill(memory.bytes);
      return { done: true };
    }
    return { sha256: digest(memory.bytes.subarray(0, request.lengthBytes)) };
  }

  /** Ends the connection when no whole request has come in time, however many bytes have. */
  const deadline = (ms: number) => setTimeout(() => socket.destroy(), ms).unref();
  let timer = deadline(limits.firstRequestMs);
  try {
    for await (const message of channel.messages) {
      clearTimeout(timer);
      // Requests that were sent ahead wait, so that timers get their turn.
      await new Promise((resolve) => setImmediate(resolve));
      const parsed = requestSchema.safeParse(message);
      try {
        if (!parsed.success) {
          throw new KvError(
            "KV_WIRE_MALFORMED",
            `not a request of this benchmark: ${parsed.error.issues[0]?.message}`,
          );
        }
        channel.send({ ok: await answer(parsed.data) });
      } catch (error) {
        const failure = KvError.from(error, "KV_INTERNAL", "the target failed");
        const { code, hint } = failure;
        channel.send({ error: { code, message: failure.message, hint } });
      }
      timer = deadline(limits.idleMs);
    }
  } finally {
    clearTimeout(timer);
    channel.close();
    await agent?.close();
    memory?.close();
  }
}

/** The task `bench-target` listens on loopback and ends with the process that started it. */
export async function benchTarget([maxBytes]: readonly string[]): Promise<never> {
  const target = await listenAsTarget({ host: "127.0.0.1", port: 0, maxBytes: Number(maxBytes) });
  await sendToOwner({ value: { port: target.port } });
  return new Promise(() => {});
}
