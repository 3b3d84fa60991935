import { createServer, type Server, type Socket } from "node:net";
import {
  type Agent,
  KvError,
  type KvErrorCode,
  type Memory,
  remoteAddressKey,
  type Transport,
} from "@kv/interface";
import { sendToOwner } from "@kv/program";
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
  /** The most memory that all initiators together may have allocated. */
  readonly maxBytes: number;
  /** Default: `DEFAULT_TARGET_LIMITS`. */
  readonly limits?: Partial<TargetLimits> | undefined;
  /** Gets one line when an initiator connects, and one when it is done. */
  readonly onSession?: ((line: string) => void) | undefined;
}

/** Bounds of a target. Who reaches one is disconnected; other sessions go on. */
export interface TargetLimits {
  /** Sessions at the same time. */
  readonly maxSessions: number;
  /** Sessions of one remote address at the same time. */
  readonly maxSessionsPerAddress: number;
  /** The longest request. */
  readonly maxLineBytes: number;
  /** The most that waits for an initiator that does not read. */
  readonly maxUnreadBytes: number;
  /** From the connection to the first whole request, in ms. */
  readonly firstRequestMs: number;
  /** Between requests, in ms: transfers take place in between. */
  readonly idleMs: number;
}

/** The limits where none are given. */
export const DEFAULT_TARGET_LIMITS: TargetLimits = {
  maxSessions: 16,
  maxSessionsPerAddress: 8,
  maxLineBytes: 4096,
  maxUnreadBytes: 64 << 10,
  firstRequestMs: 10_000,
  idleMs: 900_000,
};

/** Starts a target. Rejects with `KV_SIDE_CHANNEL_BIND_FAILED`. */
export async function listenAsTarget(options: BenchTargetOptions): Promise<BenchTarget> {
  const { host, port, maxBytes, onSession = () => {} } = options;
  const limits = { ...DEFAULT_TARGET_LIMITS, ...options.limits };
  const transport = nixlTransport();
  const sessions = new Sessions(limits);
  const room = new Room(maxBytes);
  const server = createServer((socket) => {
    sessions.begin(
      socket,
      (reason) => refuse(socket, reason),
      async () => {
        const from = `${socket.remoteAddress}:${socket.remotePort}`;
        onSession(`${from} connected`);
        try {
          await serve(socket, transport, room, limits);
          onSession(`${from} is done`);
        } catch (error) {
          onSession(`${from}: ${error instanceof Error ? error.message : String(error)}`);
        }
      },
    );
  });
  await listening(server, host, port);
  const address = server.address();
  return {
    host,
    port: typeof address === "object" && address !== null ? address.port : port,
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      await Promise.all([closed, sessions.close()]);
      await transport.close();
    },
  };
}

/** Answers an error and ends the connection. */
function refuse(socket: Socket, message: string): void {
  socket.on("error", () => {});
  const error = { code: "KV_REQUEST_INVALID" satisfies KvErrorCode, message };
  socket.end(`${JSON.stringify({ error })}\n`, () => socket.destroy());
}

/** Memory that the sessions share. */
class Room {
  readonly maxBytes: number;
  #takenBytes = 0;

  constructor(maxBytes: number) {
    this.maxBytes = maxBytes;
  }

  /**
   * Takes room until the returned function is called, which may be called again.
   * @throws `KV_REQUEST_INVALID`.
   */
  take(lengthBytes: number): () => void {
    if (this.#takenBytes + lengthBytes > this.maxBytes) {
      const others =
        this.#takenBytes === 0 ? "" : `, of which other sessions have ${this.#takenBytes}`;
      throw new KvError(
        "KV_REQUEST_INVALID",
        `${lengthBytes} bytes were requested, but this target allocates ${this.maxBytes} at most${others}`,
        { hint: "raise --max-bytes at the target, or ask for smaller --sizes" },
      );
    }
    this.#takenBytes += lengthBytes;
    let heldBytes = lengthBytes;
    return () => {
      this.#takenBytes -= heldBytes;
      heldBytes = 0;
    };
  }
}

function listening(server: Server, host: string, port: number): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once("error", (error) =>
      reject(
        new KvError(
          "KV_SIDE_CHANNEL_BIND_FAILED",
          `cannot listen on ${host}:${port}: ${error.message}`,
          {
            hint: "use another port, or end the program that listens there",
          },
        ),
      ),
    );
    server.listen(port, host, resolve);
  });
}

async function serve(
  socket: Socket,
  transport: Transport,
  room: Room,
  limits: TargetLimits,
): Promise<void> {
  const channel = channelOf(socket, limits);
  let agent: Agent | undefined;
  let memory: Memory | undefined;
  let leaveRoom = () => {};

  async function answer(request: BenchRequest): Promise<object> {
    if (request.do === "open") {
      if (memory !== undefined)
        throw new KvError("KV_REQUEST_INVALID", "this session has allocated its memory already");
      leaveRoom();
      leaveRoom = room.take(request.lengthBytes);
      const { backend } = request;
      await agent?.close();
      agent = await transport.createAgent(
        backend === undefined ? {} : { backends: [{ name: backend }] },
      );
      memory = transport.allocate(request.lengthBytes);
      await agent.register(memory);
      const metadata = await agent.localMetadata();
      return { metadata: Buffer.from(metadata).toString("base64"), address: memory.address };
    }
    if (memory === undefined) throw new KvError("KV_REQUEST_INVALID", "a session begins with open");
    if (request.do === "fill") {
      fill(memory.bytes, request.seed);
      return { done: true };
    }
    return { sha256: digest(memory.bytes.subarray(0, request.lengthBytes)) };
  }

  /** Ends the connection when no whole request has come in time, however many bytes have. */
  const deadline = (ms: number) => setTimeout(() => socket.destroy(), ms).unref();
  let timer = deadline(limits.firstRequestMs);
  try {
    for (
      let message = await channel.next();
      message !== undefined;
      message = await channel.next()
    ) {
      clearTimeout(timer);
      // Requests that were sent ahead wait their turn, so that other sessions get theirs.
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
        const {
          code,
          message: text,
          hint,
        } = KvError.from(error, "KV_INTERNAL", "the target failed");
        channel.send({ error: { code, message: text, ...(hint === undefined ? {} : { hint }) } });
      }
      timer = deadline(limits.idleMs);
    }
  } finally {
    clearTimeout(timer);
    channel.close();
    await agent?.close();
    memory?.close();
    leaveRoom();
  }
}

/**
 * The task `bench-target` of a child process: listens on loopback, reports its port, and ends with
 * the process that started it.
 */
export async function benchTarget([maxBytes]: readonly string[]): Promise<never> {
  const target = await listenAsTarget({ host: "127.0.0.1", port: 0, maxBytes: Number(maxBytes) });
  await sendToOwner({ value: { port: target.port } });
  return new Promise(() => {});
}

/** The sessions of a target: bounded in all and per remote address. */
class Sessions {
  readonly #limits: { readonly maxSessions: number; readonly maxSessionsPerAddress: number };
  readonly #running = new Map<Socket, Promise<void>>();
  readonly #perAddress = new Map<string, number>();

  constructor(limits: { readonly maxSessions: number; readonly maxSessionsPerAddress: number }) {
    this.#limits = limits;
  }

  /** Runs a session, or calls `refuse` with the reason. */
  begin(socket: Socket, refuse: (reason: string) => void, run: () => Promise<void>): void {
    const { maxSessions, maxSessionsPerAddress } = this.#limits;
    const address = remoteAddressKey(socket.remoteAddress ?? "");
    const own = this.#perAddress.get(address) ?? 0;
    if (this.#running.size >= maxSessions) {
      refuse(`the target has ${maxSessions} sessions, its limit`);
      return;
    }
    if (own >= maxSessionsPerAddress) {
      refuse(
        `the target has ${maxSessionsPerAddress} sessions of ${address}, its limit for one address`,
      );
      return;
    }
    this.#perAddress.set(address, own + 1);
    const session = run().finally(() => {
      this.#running.delete(socket);
      const left = (this.#perAddress.get(address) ?? 1) - 1;
      if (left === 0) this.#perAddress.delete(address);
      else this.#perAddress.set(address, left);
    });
    this.#running.set(socket, session);
  }

  /** Disconnects every session and waits until it has freed its memory. */
  async close(): Promise<void> {
    for (const socket of this.#running.keys()) socket.destroy();
    await Promise.all(this.#running.values());
  }
}
