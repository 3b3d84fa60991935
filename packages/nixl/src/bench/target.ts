import { createServer, type Server, type Socket } from "node:net";
import { type Agent, KvError, type Memory, type Transport } from "@kv/interface";
import { frameMetadata } from "../metadata/frame.js";
import { nixlTransport } from "../transport.js";
import { digest, fill } from "./pattern.js";
import { type BenchRequest, channelOf, requestSchema } from "./protocol.js";

/** The target of benchmarks. It allocates, fills and hashes memory as an initiator requests. */
export interface BenchTarget {
  /** The address it listens on. */
  readonly host: string;
  /** The port it listens on. */
  readonly port: number;
  /** Ends all sessions and stops listening. */
  close(): Promise<void>;
}

/** How a target listens. */
export interface BenchTargetOptions {
  /** The address to listen on. */
  readonly host: string;
  /** The port to listen on; 0 for a free one. */
  readonly port: number;
  /** The most memory that an initiator may have allocated. */
  readonly maxBytes: number;
  /** Gets one line when an initiator connects, and one when it is done. */
  readonly onSession?: ((line: string) => void) | undefined;
}

/** Starts a target. Rejects with `KV_SIDE_CHANNEL_BIND_FAILED`. */
export async function listenAsTarget(options: BenchTargetOptions): Promise<BenchTarget> {
  const { host, port, maxBytes, onSession = () => {} } = options;
  const transport = nixlTransport();
  const sessions = new Set<Promise<void>>();
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    const from = `${socket.remoteAddress}:${socket.remotePort}`;
    onSession(`${from} connected`);
    sockets.add(socket);
    const session = serve(socket, transport, maxBytes)
      .then(
        () => onSession(`${from} is done`),
        (error: unknown) => onSession(`${from}: ${error instanceof Error ? error.message : String(error)}`),
      )
      .finally(() => {
        sockets.delete(socket);
        sessions.delete(session);
      });
    sessions.add(session);
  });
  await listening(server, host, port);
  const address = server.address();
  return {
    host,
    port: typeof address === "object" && address !== null ? address.port : port,
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      for (const socket of sockets) socket.destroy();
      await Promise.all([closed, ...sessions]);
      await transport.close();
    },
  };
}

function listening(server: Server, host: string, port: number): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once("error", (error) =>
      reject(
        new KvError("KV_SIDE_CHANNEL_BIND_FAILED", `cannot listen on ${host}:${port}: ${error.message}`, {
          hint: "use another port, or end the program that listens there",
        }),
      ),
    );
    server.listen(port, host, resolve);
  });
}

async function serve(socket: Socket, transport: Transport, maxBytes: number): Promise<void> {
  const channel = channelOf(socket);
  let agent: Agent | undefined;
  let memory: Memory | undefined;

  async function answer(request: BenchRequest): Promise<object> {
    if (request.do === "open") {
      if (memory !== undefined)
        throw new KvError("KV_REQUEST_INVALID", "this session has allocated its memory already");
      if (request.lengthBytes > maxBytes) {
        throw new KvError(
          "KV_REQUEST_INVALID",
          `${request.lengthBytes} bytes were requested, but this target allocates ${maxBytes} at most`,
          { hint: "raise --max-bytes at the target, or ask for smaller --sizes" },
        );
      }
      const { backend } = request;
      agent = await transport.createAgent(backend === undefined ? {} : { backends: [{ name: backend }] });
      memory = transport.allocate(request.lengthBytes);
      await agent.register(memory);
      const metadata = frameMetadata(await agent.localMetadata());
      return { metadata: Buffer.from(metadata).toString("base64"), address: memory.address };
    }
    if (memory === undefined) throw new KvError("KV_REQUEST_INVALID", "a session begins with open");
    if (request.do === "fill") {
      fill(memory.bytes, request.seed);
      return { done: true };
    }
    return { sha256: digest(memory.bytes.subarray(0, request.lengthBytes)) };
  }

  try {
    for (let message = await channel.next(); message !== undefined; message = await channel.next()) {
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
        const { code, message: text, hint } = KvError.from(error, "KV_INTERNAL", "the target failed");
        channel.send({ error: { code, message: text, ...(hint === undefined ? {} : { hint }) } });
      }
    }
  } finally {
    channel.close();
    await agent?.close();
    memory?.close();
  }
}

/** The task `bench-target` of a child process: listens on loopback, reports its port, and ends with the process that started it. */
export async function benchTarget([maxBytes]: readonly string[]): Promise<never> {
  const target = await listenAsTarget({ host: "127.0.0.1", port: 0, maxBytes: Number(maxBytes) });
  process.send?.({ port: target.port });
  return new Promise(() => {});
}
