import { type Clock, KvError, type SideChannelReply, type SideChannelRequest } from "@kv/interface";
import type { IdleConnections } from "./idle-connections.js";
import { type ConnectionStage, type ReplyLimits, ZmqConnection } from "./zmq-connection.js";
import { reasonOf, resolveHost } from "./zmq-endpoint.js";

export interface ZmqRequestOptions {
  readonly clock: Clock;
  readonly replies: ReplyLimits;
  readonly inFlight: Set<(error: unknown) => void>;
  readonly idle: IdleConnections;
}

/** The stage of a request; it selects the text of an error. */
type Stage = "looking up" | ConnectionStage;

/**
 * Sends one request over an idle connection, or over a new one. The request is sent once the connection is established, so that its
 * timeout covers only the exchange. A refused or lost connection ends it at once. Until it ends, `inFlight` holds a function that
 * cancels it. Errors: `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`.
 */
export async function zmqRequest(
  given: SideChannelRequest,
  options: ZmqRequestOptions,
): Promise<SideChannelReply> {
  given.signal?.throwIfAborted();
  const kept = options.idle.take(peerOf(given));
  if (kept !== undefined) {
    try {
      return await requestOver(kept, given, options);
    } catch (error) {
      // The idle connection may be dead: the peer was restarted, or a firewall dropped it.
      if (!KvError.is(error, "KV_SIDE_CHANNEL_UNREACHABLE")) throw error;
    }
  }
  return requestOver(undefined, given, options);
}

async function requestOver(
  kept: ZmqConnection | undefined,
  given: SideChannelRequest,
  { clock, replies, inFlight, idle }: ZmqRequestOptions,
): Promise<SideChannelReply> {
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
      throw unreachable(given, `${host} was not found: ${reasonOf(error)}`, error);
    }
    // A socket opened after the cancellation would never be closed.
    if (over) throw timedOut(given, stage());
    return new ZmqConnection(address, port, replies);
  }

  async function exchange(): Promise<SideChannelReply> {
    connection ??= await connect();
    connection.onLost = (why) => end(unreachable(given, why));
    // An idle connection may have been lost in the meantime.
    if (connection.lost) throw unreachable(given, "it closed the connection");
    await connection.greeted();
    const sentAtMs = clock.now();
    const answered = await connection.exchange(frames);
    return { frames: answered, sentAtMs, receivedAtMs: clock.now() };
  }

  try {
    const exchanged = exchange();
    exchanged.catch(() => {});
    const reply = await Promise.race([exchanged, ended]);
    if (connection !== undefined) idle.keep(peerOf(given), connection);
    connection = undefined;
    return reply;
  } catch (error) {
    if (KvError.is(error) || (signal?.aborted === true && error === signal.reason)) throw error;
    throw unreachable(given, reasonOf(error), error);
  } finally {
    over = true;
    timer.cancel();
    inFlight.delete(end);
    signal?.removeEventListener("abort", aborted);
    connection?.close();
  }
}

const peerOf = ({ host, port }: SideChannelRequest) => `${host}:${port}`;

function timedOut(given: SideChannelRequest, stage: Stage): KvError {
  const { host, port, timeoutMs } = given;
  if (stage !== "established") {
    const what = stage === "greeting" ? "TCP connected, but no ZMQ greeting came" : "no connection";
    return unreachable(given, `${what} within ${timeoutMs} ms`);
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

function unreachable({ host, port }: SideChannelRequest, why: string, cause?: unknown): KvError {
  return new KvError(
    "KV_SIDE_CHANNEL_UNREACHABLE",
    `side channel: ${host}:${port} cannot be reached: ${why}`,
    {
      hint: ["localhost", "127.0.0.1", "::1"].includes(host)
        ? "nothing listens on this port of this host; a peer on another host must announce an address that this host can reach (VLLM_NIXL_SIDE_CHANNEL_HOST)"
        : "is the peer up, and its VLLM_NIXL_SIDE_CHANNEL_PORT open to this host?",
      details: { host, port },
      ...(cause === undefined ? {} : { cause }),
    },
  );
}
