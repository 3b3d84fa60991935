import { type Clock, KvError, type SideChannelReply, type SideChannelRequest } from "@kv/interface";
import { Request } from "zeromq";
import { asBuffer, reasonOf } from "./frames.js";
import { type ZmqEndpoint, zmqEndpoint } from "./zmq-endpoint.js";

export interface ZmqRequestOptions {
  readonly clock: Clock;
  readonly maxReplyBytes: number;
  readonly inFlight: Set<(error: unknown) => void>;
}

/** How far a request has come: what an error says depends on it. */
type Stage = "looking up" | "connecting" | "greeting" | "waiting";

/**
 * One request over a socket of its own: a REQ that timed out cannot be used again. The request leaves only when the connection
 * stands, so that its times bound the exchange alone. A refused or lost connection ends it at once. While it lasts, `inFlight` holds
 * what ends it early. Errors: `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`.
 */
export async function zmqRequest(
  given: SideChannelRequest,
  { clock, maxReplyBytes, inFlight }: ZmqRequestOptions,
): Promise<SideChannelReply> {
  const { host, port, frames, timeoutMs, signal } = given;
  signal?.throwIfAborted();
  let stage: Stage = "looking up";
  let socket: Request | undefined;
  let over = false;

  /** Rejects when the request is to end early, whatever it is waiting for. */
  let end: (error: unknown) => void = () => {};
  const ended = new Promise<never>((_, reject) => {
    end = reject;
  });
  ended.catch(() => {});
  inFlight.add(end);
  const aborted = () => end(signal?.reason);
  signal?.addEventListener("abort", aborted, { once: true });
  const timer = clock.setTimer(() => end(timedOut(given, stage)), timeoutMs);

  async function exchange(): Promise<SideChannelReply> {
    let endpoint: ZmqEndpoint;
    try {
      endpoint = await zmqEndpoint(host, port);
    } catch (error) {
      throw unreachable(given, `${host} was not found: ${reasonOf(error)}`, error);
    }
    // Nobody would close a socket that is opened after the end.
    if (over) throw timedOut(given, stage);
    stage = "connecting";
    socket = new Request({ linger: 0, ipv6: endpoint.ipv6, maxMessageSize: maxReplyBytes });
    const { events } = socket;
    events.on("connect", () => {
      stage = "greeting";
    });
    // ZMQ would go on trying. The peer has answered a moment ago, over HTTP at least: now its port is closed.
    events.on("connect:retry", () => {
      if (stage === "connecting") end(unreachable(given, "the connection was refused"));
    });
    events.on("disconnect", () => {
      const why =
        stage === "greeting"
          ? "what listens there does not speak ZMQ"
          : `it closed the connection, or its reply is larger than ${maxReplyBytes} bytes`;
      // A reply that came before the end of the connection is delivered before the next turn.
      setImmediate(() => end(unreachable(given, why)));
    });
    const greeted = new Promise<void>((resolve) => events.on("handshake", () => resolve()));
    socket.connect(endpoint.url);
    await greeted;
    stage = "waiting";
    const sentAtMs = clock.now();
    await socket.send(frames.map(asBuffer));
    const answered = await socket.receive();
    return { frames: answered, sentAtMs, receivedAtMs: clock.now() };
  }

  try {
    const exchanged = exchange();
    exchanged.catch(() => {});
    return await Promise.race([exchanged, ended]);
  } catch (error) {
    if (KvError.is(error) || (signal?.aborted === true && error === signal.reason)) throw error;
    throw unreachable(given, reasonOf(error), error);
  } finally {
    over = true;
    timer.cancel();
    inFlight.delete(end);
    signal?.removeEventListener("abort", aborted);
    (socket as Request | undefined)?.close();
  }
}

function timedOut(given: SideChannelRequest, stage: Stage): KvError {
  const { host, port, timeoutMs } = given;
  if (stage !== "waiting") {
    const what = stage === "greeting" ? "something answers there, and not in ZMQ" : "no connection";
    return unreachable(given, `${what} within ${timeoutMs} ms`);
  }
  return new KvError(
    "KV_SIDE_CHANNEL_TIMEOUT",
    `side channel: ${host}:${port} took the request and did not answer within ${timeoutMs} ms`,
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
        ? "nothing listens there on this host; a peer on another one has to announce an address that others reach (VLLM_NIXL_SIDE_CHANNEL_HOST)"
        : "is the peer up, and its VLLM_NIXL_SIDE_CHANNEL_PORT open to this host?",
      details: { host, port },
      ...(cause === undefined ? {} : { cause }),
    },
  );
}
