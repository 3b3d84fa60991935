import { lookup } from "node:dns/promises";
import { connect, isIP } from "node:net";
import { type Clock, KvError } from "@kv/interface";
import { ZmtpSession } from "@kv/protocol";

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
const MAX_UNSENT_BYTES = 64 * 1024;

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
  let waitsFor = "the lookup of its name";
  const unreachable = (why: string, cause?: unknown) =>
    new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${where} cannot be reached: ${why}`, {
      hint: "is the engine up, is this the address of its side channel (VLLM_NIXL_SIDE_CHANNEL_HOST, _PORT), and may this host connect to it?",
      details,
      cause,
    });
  let end = (_error: unknown) => {};
  const ended = new Promise<never>((_, reject) => {
    end = reject;
  });
  ended.catch(() => {});
  const timer = clock.setTimer(() => {
    const message = `${where} did not answer within ${timeoutMs} ms; waited for ${waitsFor}`;
    end(new KvError("KV_SIDE_CHANNEL_TIMEOUT", message, { details: { ...details, timeoutMs } }));
  }, timeoutMs);
  const aborted = () => end(signal?.reason);
  signal?.addEventListener("abort", aborted, { once: true });
  if (signal?.aborted === true) aborted();
  let close = () => {};
  try {
    const found = isIP(host) === 0 ? lookup(host).then(({ address }) => address) : Promise.resolve(host);
    const address = await Promise.race([
      found.catch((error) => end(unreachable(String(error), error))),
      ended,
    ]);
    const session = new ZmtpSession({
      socketType: "REQ",
      peerTypes: ["ROUTER", "REP"],
      maxFrames: MAX_FRAMES,
      maxMessageBytes: MAX_REPLY_BYTES,
    });
    waitsFor = "the connection";
    const socket = connect({ host: String(address), port, noDelay: true });
    close = () => socket.destroy();
    const reply = new Promise<readonly Uint8Array[]>((resolve) => {
      socket.on("connect", () => {
        waitsFor = "its ZMQ greeting";
        socket.write(session.greeting);
      });
      socket.on("data", (chunk) => {
        try {
          session.push(chunk);
          for (let event = session.read(); event !== undefined; event = session.read()) {
            if (event.type === "message") resolve(event.frames);
            else if (event.type === "send") for (const bytes of event.chunks) socket.write(bytes);
            else {
              waitsFor = "its reply";
              for (const bytes of session.encode([new Uint8Array(0), ...frames])) socket.write(bytes);
            }
            if (socket.writableLength > MAX_UNSENT_BYTES)
              throw new Error("it asks for answers and does not read them");
          }
        } catch (error) {
          end(unreachable(`what answers there is no side channel: ${reasonOf(error)}`, error));
        }
      });
      socket.on("error", (error) => end(unreachable(reasonOf(error), error)));
      socket.on("close", () => end(unreachable(`it closed the connection before ${waitsFor}`)));
    });
    const [delimiter, ...answer] = await Promise.race([reply, ended]);
    if (delimiter?.byteLength !== 0) throw unreachable("its reply has no delimiter");
    return answer;
  } finally {
    timer.cancel();
    signal?.removeEventListener("abort", aborted);
    close();
  }
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
