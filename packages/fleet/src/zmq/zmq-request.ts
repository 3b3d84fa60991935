import { lookup } from "node:dns/promises";
import { isIP } from "node:net";
import { type Clock, KvError } from "@kv/interface";
import { ZmqConnection } from "./zmq-connection.js";

/** Where an engine answers handshakes. */
export interface SideChannelAddress {
  /** Host name or IP address; an IPv6 address has no brackets. */
  readonly host: string;
  /** TCP port, 1 to 65535. */
  readonly port: number;
}

/** Options of `requestOverSideChannel`. */
export interface SideChannelRequestOptions {
  readonly clock: Clock;
  /** For everything: the lookup of the name, the connection, the greeting and the reply. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

const MAX_FRAMES = 4;
/** A handshake of a model with hundreds of layers has some hundred KiB. */
const MAX_REPLY_BYTES = 4 * 2 ** 20;

/**
 * Sends one request to an engine's side channel (ZeroMQ's REQ to ROUTER, as in vLLM 0.32 and 0.33), and resolves with the frames of the reply. The
 * connection is closed afterwards. What comes is limited while it arrives: four frames, 4 MiB. Errors: `KV_SIDE_CHANNEL_UNREACHABLE` (also
 * for a server that speaks something else), `KV_SIDE_CHANNEL_TIMEOUT`; the signal's reason.
 */
export async function requestOverSideChannel(
  { host, port }: SideChannelAddress,
  frames: readonly Uint8Array[],
  { clock, timeoutMs, signal }: SideChannelRequestOptions,
): Promise<readonly Uint8Array[]> {
  const where = `side channel: ${host}:${port}`;
  const details = { host, port };
  let connection: ZmqConnection | undefined;
  const unreachable = (why: string, cause?: unknown) =>
    new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${where} cannot be reached: ${why}`, {
      hint: isAboutCurve(cause)
        ? `side_channel_curve is on at this engine, and here is no key for it: ${WITHOUT_KEY_HINT}`
        : "is the engine up, is this the address of its side channel (VLLM_NIXL_SIDE_CHANNEL_HOST, _PORT), and may this host connect to it?",
      details,
      cause,
    });
  const { promise: ended, reject: end } = withReject();
  const timer = clock.setTimer(() => {
    const waitsFor = connection?.waitsFor ?? "the lookup of its name";
    const message = `${where} did not answer within ${timeoutMs} ms; waited for ${waitsFor}`;
    end(new KvError("KV_SIDE_CHANNEL_TIMEOUT", message, { details: { ...details, timeoutMs } }));
  }, timeoutMs);
  const aborted = () => end(signal?.reason);
  signal?.addEventListener("abort", aborted, { once: true });
  if (signal?.aborted === true) aborted();
  try {
    const found = isIP(host) === 0 ? lookup(host).then(({ address }) => address) : Promise.resolve(host);
    const address = await Promise.race([found, ended]).catch((error: unknown) => {
      throw KvError.is(error) || error === signal?.reason ? error : unreachable(String(error), error);
    });
    const reply = new Promise<readonly Uint8Array[]>((resolve) => {
      const opened = new ZmqConnection({
        ...{ host: address, port },
        ...{ socketType: "REQ", peerTypes: ["ROUTER", "REP"] },
        ...{ maxFrames: MAX_FRAMES, maxMessageBytes: MAX_REPLY_BYTES },
        ready: () => opened.send([new Uint8Array(0), ...frames]),
        message: resolve,
        closed: (error) =>
          end(
            error === undefined
              ? unreachable(`it closed the connection before ${opened.waitsFor}`)
              : unreachable(
                  opened.waitsFor === "the connection"
                    ? reasonOf(error)
                    : isAboutCurve(error)
                      ? reasonOf(error)
                      : `what answers there is no side channel: ${reasonOf(error)}`,
                  error,
                ),
          ),
      });
      connection = opened;
    });
    const [delimiter, ...answer] = await Promise.race([reply, ended]);
    if (delimiter?.byteLength !== 0) throw unreachable("its reply has no delimiter");
    return answer;
  } finally {
    timer.cancel();
    signal?.removeEventListener("abort", aborted);
    connection?.close();
  }
}

/** What to do with an engine that answers only those who have its key. */
export const WITHOUT_KEY_HINT = "give the instances labels, or set pairing to off";

function isAboutCurve(error: unknown): boolean {
  return KvError.is(error) && error.details["peerMechanism"] === "CURVE";
}

function withReject(): { promise: Promise<never>; reject(error: unknown): void } {
  let reject: (error: unknown) => void = () => {};
  const promise = new Promise<never>((_, refuse) => {
    reject = refuse;
  });
  promise.catch(() => {});
  return { promise, reject };
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
