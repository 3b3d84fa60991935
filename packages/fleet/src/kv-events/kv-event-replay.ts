import { type Clock, KvError } from "@kv/interface";
import { readTcpEndpoint, ZmqConnection } from "@kv/side-channel";
import { SUBSCRIPTION_LIMITS } from "./kv-event-batch.js";

/** Options of `replayBatches`. */
export interface ReplayOptions {
  readonly endpoint: string;
  readonly from: bigint;
  readonly clock: Clock;
  readonly signal: AbortSignal;
  /**
   * Called with each batch, in the order of sequence numbers, which may have gaps. The next one is
   * read when its promise has resolved.
   */
  batch(sequence: bigint, payload: Uint8Array): Promise<void> | undefined;
}

/**
 * Between two messages of a replay, in ms. vLLM's publisher looks for requests at least every 100
 * ms.
 */
const IDLE_TIMEOUT_MS = 5000;
/** For a whole replay, in ms, without the time in which its batches are applied. */
const REPLAY_TIMEOUT_MS = 60_000;
/** The sequence number -1 ends a replay. */
const END = 2n ** 64n - 1n;

/**
 * Asks a publisher for the batches that it still has (vLLM 0.32 and 0.33,
 * `ZmqEventPublisher._service_replay`: a ROUTER that answers one request with one message per
 * batch, the sequence number -1 last). Resolves at the end of the replay.
 *
 * @throws `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`, `KV_WIRE_MALFORMED` for
 * sequence numbers that do not grow; the signal's reason.
 */
export async function replayBatches({
  endpoint,
  from,
  clock,
  signal,
  batch,
}: ReplayOptions): Promise<void> {
  signal.throwIfAborted();
  const { host, port } = readTcpEndpoint(endpoint) ?? { host: "", port: 0 };
  const { maxFrames, maxMessageBytes } = SUBSCRIPTION_LIMITS;
  const startedAtMs = clock.now();
  let appliedMs = 0;
  let last = from - 1n;
  await new Promise<void>((resolve, reject) => {
    const timeout = () => {
      const message = `the replay socket ${endpoint} did not answer in time; the connection is ${connection.stage}`;
      end(new KvError("KV_SIDE_CHANNEL_TIMEOUT", message));
    };
    let timer = clock.setTimer(timeout, IDLE_TIMEOUT_MS);
    const end = (error?: unknown) => {
      timer.cancel();
      signal.removeEventListener("abort", aborted);
      connection.close();
      if (error === undefined) resolve();
      else reject(error);
    };
    const aborted = () => end(signal.reason);
    const connection = new ZmqConnection({
      host,
      port,
      socketType: "REQ",
      peerTypes: ["ROUTER", "REP"],
      maxFrames,
      maxMessageBytes,
    });
    connection.keepAlive(false);
    connection.onEstablished = () => connection.send([new Uint8Array(0), encodeSequence(from)]);
    connection.onMessage = (frames) => {
      // The delimiter, in later versions the topic, the sequence number and the payload.
      const [number, payload] = frames.slice(-2);
      const sequence = readSequence(number);
      if (sequence === undefined || payload === undefined || frames[0]?.byteLength !== 0)
        throw new KvError("KV_WIRE_MALFORMED", "a replayed message is not a batch");
      if (sequence === END) {
        end();
        return undefined;
      }
      if (sequence <= last)
        throw new KvError(
          "KV_WIRE_MALFORMED",
          `batch ${sequence} was replayed after batch ${last}`,
        );
      last = sequence;
      const beganAtMs = clock.now();
      if (beganAtMs - startedAtMs - appliedMs > REPLAY_TIMEOUT_MS) {
        timeout();
        return undefined;
      }
      timer.cancel();
      return Promise.resolve(batch(sequence, payload)).then(() => {
        appliedMs += clock.now() - beganAtMs;
        if (!connection.lost) timer = clock.setTimer(timeout, IDLE_TIMEOUT_MS);
      });
    };
    connection.onLost = ({ why, cause }) => {
      const message = `the replay socket ${endpoint} cannot be reached: ${why}`;
      end(KvError.is(cause) ? cause : new KvError("KV_SIDE_CHANNEL_UNREACHABLE", message));
    };
    signal.addEventListener("abort", aborted, { once: true });
  });
}

/**
 * A sequence number as the publisher sends it: 8 bytes, big-endian; undefined for anything else.
 */
export function readSequence(frame: Uint8Array | undefined): bigint | undefined {
  if (frame?.byteLength !== 8) return undefined;
  return new DataView(frame.buffer, frame.byteOffset, frame.byteLength).getBigUint64(0);
}

function encodeSequence(sequence: bigint): Uint8Array {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, sequence);
  return bytes;
}
