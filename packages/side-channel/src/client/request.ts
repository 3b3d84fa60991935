import {
  type Clock,
  KvError,
  type SideChannelReply,
  type SideChannelRequest,
  type Timer,
} from "@kv/interface";
import { CURVE_HINT, type CurveKeySource } from "../keys.js";
import { reasonOf, resolveHost } from "../zmq-endpoint.js";
import {
  type ConnectionLoss,
  type ConnectionStage,
  refuseMessage,
  ZmqConnection,
} from "./connection.js";

export interface ZmqRequestOptions {
  readonly clock: Clock;
  readonly replies: { readonly maxFrames: number; readonly maxMessageBytes: number };
  readonly inFlight: Set<(error: unknown) => void>;
  readonly idle: IdleConnections;
  /** Allows only CURVE. Absent: NULL. */
  readonly curve: CurveKeySource;
}

type Stage = "looking up" | ConnectionStage;

/**
 * Sends one request over an idle or a new connection. Its timeout excludes connecting. A refused or
 * lost connection ends it at once. Meanwhile `inFlight` holds a function that cancels it.
 *
 * @throws `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`; `KV_HANDSHAKE_UNTRUSTED` where
 * one side has a key and the other has none, or another one.
 */
export async function zmqRequest(
  given: SideChannelRequest,
  options: ZmqRequestOptions,
): Promise<SideChannelReply> {
  given.signal?.throwIfAborted();
  const key = idleKey(given, options);
  const kept = options.idle.take(key);
  if (kept !== undefined) {
    try {
      return await requestOver(kept, key, given, options);
    } catch (error) {
      // After a restart or behind a firewall, the idle connection may be dead.
      if (!KvError.is(error, "KV_SIDE_CHANNEL_UNREACHABLE")) throw error;
    }
  }
  return requestOver(undefined, key, given, options);
}

async function requestOver(
  kept: ZmqConnection | undefined,
  key: string,
  given: SideChannelRequest,
  options: ZmqRequestOptions,
): Promise<SideChannelReply> {
  const { clock, replies, inFlight, idle, curve } = options;
  const { host, port, frames, timeoutMs, signal } = given;
  let connection = kept;
  let over = false;
  const stage = (): Stage => connection?.stage ?? "looking up";

  let end: (error: unknown) => void = () => {};
  const ended = new Promise<never>((_, reject) => {
    end = reject;
  });
  ended.catch(() => {});
  inFlight.add(end);
  const aborted = () => end(signal?.reason);
  signal?.addEventListener("abort", aborted, { once: true });
  const timer = clock.setTimer(() => end(timedOut(given, stage())), timeoutMs);

  async function connect(): Promise<ZmqConnection> {
    let address: string;
    try {
      address = await resolveHost(host);
    } catch (error) {
      throw lost(given, { why: `${host} was not found: ${reasonOf(error)}`, cause: error });
    }
    // After the cancellation, nobody would close the socket.
    if (over) throw timedOut(given, stage());
    const socket = { socketType: "REQ", peerTypes: ["ROUTER", "REP"] } as const;
    return new ZmqConnection({ host: address, port, ...socket, ...replies, curve });
  }

  async function exchange(): Promise<SideChannelReply> {
    connection ??= await connect();
    connection.onLost = (loss) => end(lost(given, loss));
    // An idle connection may have been lost meanwhile.
    if (connection.lost) throw lost(given, { why: "it closed the connection" });
    await established(connection);
    const sentAtMs = clock.now();
    const answered = await replyTo(frames, connection);
    return { frames: answered, sentAtMs, receivedAtMs: clock.now() };
  }

  try {
    const exchanged = exchange();
    exchanged.catch(() => {});
    const reply = await Promise.race([exchanged, ended]);
    if (connection !== undefined) idle.keep(key, connection);
    connection = undefined;
    return reply;
  } catch (error) {
    if (KvError.is(error) || (signal?.aborted === true && error === signal.reason)) throw error;
    throw lost(given, { why: reasonOf(error), cause: error });
  } finally {
    over = true;
    timer.cancel();
    inFlight.delete(end);
    signal?.removeEventListener("abort", aborted);
    connection?.close();
  }
}

/** Never resolves for a lost connection. */
function established(connection: ZmqConnection): Promise<void> {
  if (connection.stage === "established") return Promise.resolve();
  return new Promise((resolve) => {
    connection.onEstablished = resolve;
  });
}

/** Resolves with the reply's frames; never when the connection is lost. */
function replyTo(
  frames: readonly Uint8Array[],
  connection: ZmqConnection,
): Promise<readonly Uint8Array[]> {
  return new Promise((resolve) => {
    connection.onMessage = ([delimiter, ...reply]) => {
      connection.onMessage = refuseMessage;
      if (delimiter?.byteLength !== 0) refuseMessage();
      resolve(reply);
    };
    connection.send([new Uint8Array(0), ...frames]);
  });
}

function idleKey({ host, port }: SideChannelRequest, { curve }: ZmqRequestOptions): string {
  const key = Buffer.from(curve?.()[0]?.server.publicKey ?? []).toString("base64");
  return `${host}:${port} ${key}`;
}

function timedOut(given: SideChannelRequest, stage: Stage): KvError {
  const { host, port, timeoutMs } = given;
  if (stage !== "established") {
    const what = stage === "greeting" ? "TCP connected, but no ZMQ greeting came" : "no connection";
    return lost(given, { why: `${what} within ${timeoutMs} ms` });
  }
  return new KvError(
    "KV_SIDE_CHANNEL_TIMEOUT",
    `side channel: ${host}:${port} accepted the request but did not answer within ${timeoutMs} ms`,
    {
      hint: "the peer's listener may be down (vLLM's stops at a malformed request), or the rank is not one of the peer's",
      details: { host, port, timeoutMs },
    },
  );
}

function lost({ host, port }: SideChannelRequest, { why, hint, cause }: ConnectionLoss): KvError {
  const options = { details: { host, port }, ...(cause === undefined ? {} : { cause }) };
  if (KvError.is(cause, "KV_HANDSHAKE_UNTRUSTED")) {
    return new KvError(
      "KV_HANDSHAKE_UNTRUSTED",
      `side channel: ${host}:${port} is refused: ${why}`,
      {
        ...options,
        hint: CURVE_HINT,
      },
    );
  }
  const isLocal = ["localhost", "127.0.0.1", "::1"].includes(host);
  return new KvError(
    "KV_SIDE_CHANNEL_UNREACHABLE",
    `side channel: ${host}:${port} cannot be reached: ${why}`,
    {
      ...options,
      hint:
        hint ??
        (isLocal
          ? "nothing listens on this port of this host; a peer on another host must announce an address that this host can reach (VLLM_NIXL_SIDE_CHANNEL_HOST)"
          : "is the peer up, and its VLLM_NIXL_SIDE_CHANNEL_PORT open to this host?"),
    },
  );
}

const IDLE_MS = 10_000;

/** Kept because connecting takes longer than a request and its reply. */
export class IdleConnections {
  readonly #clock: Clock;
  readonly #perPeer: number;
  readonly #peers = new Map<string, Map<ZmqConnection, Timer>>();
  #closed = false;

  constructor(clock: Clock, perPeer: number) {
    this.#clock = clock;
    this.#perPeer = perPeer;
  }

  take(peer: string): ZmqConnection | undefined {
    const connection = [...(this.#peers.get(peer)?.keys() ?? [])].at(-1);
    if (connection === undefined) return undefined;
    this.#leave(peer, connection);
    connection.keepAlive(true);
    return connection;
  }

  /** Keeps a connection for a limited time. Closes a surplus or lost one. */
  keep(peer: string, connection: ZmqConnection): void {
    const idle = this.#peers.get(peer) ?? new Map<ZmqConnection, Timer>();
    if (this.#closed || connection.lost || idle.size >= this.#perPeer) {
      connection.close();
      return;
    }
    this.#peers.set(peer, idle);
    connection.onLost = () => this.#end(peer, connection);
    connection.keepAlive(false);
    idle.set(
      connection,
      this.#clock.setTimer(() => this.#end(peer, connection), IDLE_MS),
    );
  }

  close(): void {
    this.#closed = true;
    for (const [peer, idle] of this.#peers)
      for (const connection of [...idle.keys()]) this.#end(peer, connection);
  }

  #end(peer: string, connection: ZmqConnection): void {
    this.#leave(peer, connection);
    connection.close();
  }

  #leave(peer: string, connection: ZmqConnection): void {
    const idle = this.#peers.get(peer);
    idle?.get(connection)?.cancel();
    idle?.delete(connection);
    if (idle?.size === 0) this.#peers.delete(peer);
  }
}
