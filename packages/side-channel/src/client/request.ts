import { type Clock, KvError, type SideChannelReply, type SideChannelRequest } from "@kv/interface";
import { CURVE_HINT, type CurveKeySource } from "../keys/curve.js";
import { reasonOf, resolveHost } from "../zmq-endpoint.js";
import {
  type ConnectionLoss,
  type ConnectionStage,
  refuseMessage,
  ZmqConnection,
} from "./connection.js";
import type { IdleConnections } from "./idle-connections.js";

export interface ZmqRequestOptions {
  readonly clock: Clock;
  readonly replies: { readonly maxFrames: number; readonly maxMessageBytes: number };
  readonly inFlight: Set<(error: unknown) => void>;
  readonly idle: IdleConnections;
  /** Connections use CURVE and nothing else. Absent: NULL. */
  readonly curve: CurveKeySource;
}

/** The stage of a request; it selects the text of an error. */
type Stage = "looking up" | ConnectionStage;

/**
 * Sends one request over an idle connection, or over a new one. The request is sent once the
 * connection is established, so that its timeout covers only the exchange. A refused or lost
 * connection ends it at once. Until it ends, `inFlight` holds a function that cancels it.
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
      // The idle connection may be dead: the peer was restarted, or a firewall dropped it.
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

  /** Rejects when the request is cancelled, whatever it waits for. */
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
    // A socket opened after the cancellation would never be closed.
    if (over) throw timedOut(given, stage());
    const socket = { socketType: "REQ", peerTypes: ["ROUTER", "REP"] } as const;
    return new ZmqConnection({ host: address, port, ...socket, ...replies, curve });
  }

  async function exchange(): Promise<SideChannelReply> {
    connection ??= await connect();
    connection.onLost = (loss) => end(lost(given, loss));
    // An idle connection may have been lost in the meantime.
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

/** Resolves when messages can be sent; never for a connection that is lost. */
function established(connection: ZmqConnection): Promise<void> {
  if (connection.stage === "established") return Promise.resolve();
  return new Promise((resolve) => {
    connection.onEstablished = resolve;
  });
}

/** Sends a request and resolves with the frames of its reply; never when the connection is lost. */
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

/** A kept connection is used by requests to the same address with the same mechanism and key. */
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

/** The error for a connection that was refused or lost. */
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
