import {
  type Clock,
  KvError,
  type Log,
  type SideChannelListener,
  type SideChannelListenOptions,
} from "@kv/interface";
import { Router } from "zeromq";
import { asBuffer, reasonOf, zmqEndpoint } from "./zmq-endpoint.js";

export interface ZmqListenerOptions extends SideChannelListenOptions {
  readonly clock: Clock;
  readonly log: Log;
  /** Longest request frame, in bytes. ZMQ closes the connection of a peer that sends a longer one. */
  readonly maxRequestBytes: number;
  /** Requests that are handled at a time; further ones wait in the sockets. */
  readonly maxPending: number;
}

/** More frames than any request has. ZMQ limits the size of a frame, but not the number of frames. */
const MAX_FRAMES = 16;
/** Malformed requests are logged once per this interval, with the number of suppressed entries. */
const COMPLAINT_INTERVAL_MS = 1000;

/** Binds a ROUTER socket and answers requests until it is closed. Errors: `KV_SIDE_CHANNEL_BIND_FAILED`. */
export async function openZmqListener(options: ZmqListenerOptions): Promise<SideChannelListener> {
  const { host, port, answer, clock, log, maxPending } = options;
  const router = await bound(options);
  const pending = new Set<Promise<void>>();
  let close: () => void = () => {};
  const closed = new Promise<void>((resolve) => {
    close = resolve;
  });
  let complainedAtMs = Number.NEGATIVE_INFINITY;
  let suppressed = 0;

  function complain(event: string, fields: Readonly<Record<string, unknown>>): void {
    if (clock.now() - complainedAtMs < COMPLAINT_INTERVAL_MS) {
      suppressed += 1;
      return;
    }
    log.warn(event, { ...fields, suppressed });
    complainedAtMs = clock.now();
    suppressed = 0;
  }

  /** Runs until `close`: no received message ends it. */
  async function serve(): Promise<void> {
    while (!router.closed) {
      let frames: Buffer[];
      try {
        frames = await router.receive();
      } catch (error) {
        if (router.closed) return;
        complain("side-channel-receive-failed", { reason: reasonOf(error) });
        // A receive that fails immediately, again and again, would starve the event loop.
        await new Promise((resolve) => setImmediate(resolve));
        continue;
      }
      const replied = reply(frames).finally(() => pending.delete(replied));
      pending.add(replied);
      if (pending.size >= maxPending) await Promise.race([...pending, closed]);
    }
  }

  async function reply(frames: Buffer[]): Promise<void> {
    const [identity, delimiter] = frames;
    if (identity === undefined) return;
    // REQ puts an empty frame between the route and the message; a DEALER may leave it out.
    const enveloped = delimiter !== undefined && delimiter.byteLength === 0;
    const route = enveloped ? [identity, delimiter] : [identity];
    try {
      if (frames.length > MAX_FRAMES)
        throw new KvError(
          "KV_WIRE_LIMIT_EXCEEDED",
          `${frames.length} frames, at most ${MAX_FRAMES} are accepted`,
        );
      const answered = await answer(frames.slice(route.length));
      if (answered === undefined || router.closed) return;
      await router.send([...route, ...answered.map(asBuffer)]);
    } catch (error) {
      complain("side-channel-request-refused", { frames: frames.length, reason: reasonOf(error) });
    }
  }

  const served = serve();
  let closing: Promise<void> | undefined;

  async function shut(): Promise<void> {
    // Not `unbind`: it runs on another thread while this one receives, and a ZMQ socket may be used by one thread at a time.
    // The port closes a little later than the socket. A peer that connects in between is dropped.
    const portClosed = new Promise<void>((resolve) => {
      router.events.on("close", () => resolve());
      router.events.on("end", () => resolve());
    });
    router.close();
    close();
    await portClosed;
    await served;
  }

  return {
    host,
    port: Number(router.lastEndpoint?.split(":").at(-1) ?? port),
    close() {
      closing ??= shut();
      return closing;
    },
  };
}

async function bound({ host, port, maxRequestBytes }: ZmqListenerOptions): Promise<Router> {
  let router: Router | undefined;
  try {
    const { url, ipv6 } = await zmqEndpoint(host, port === 0 ? "*" : port);
    router = new Router({
      linger: 0,
      ipv6,
      maxMessageSize: maxRequestBytes,
      handover: true,
      sendTimeout: 1000,
    });
    await router.bind(url);
    return router;
  } catch (error) {
    router?.close();
    throw new KvError(
      "KV_SIDE_CHANNEL_BIND_FAILED",
      `side channel: ${host}:${port} cannot be bound: ${reasonOf(error)}`,
      { hint: bindHint(error, host, port), details: { host, port }, cause: error },
    );
  }
}

function bindHint(error: unknown, host: string, port: number): string {
  const code = (error as { code?: unknown } | undefined)?.code;
  if (code === "EADDRINUSE")
    return `another engine has port ${port}: give each engine of a host its own VLLM_NIXL_SIDE_CHANNEL_PORT, or end the one that has it`;
  if (code === "EACCES")
    return "ports below 1024 are reserved: set VLLM_NIXL_SIDE_CHANNEL_PORT to a higher one";
  return `${host} must be a name or an address of this host: set VLLM_NIXL_SIDE_CHANNEL_HOST`;
}
