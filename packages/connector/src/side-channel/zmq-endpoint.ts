import { lookup } from "node:dns/promises";
import { isIP } from "node:net";

export interface ZmqEndpoint {
  readonly url: string;
  readonly ipv6: boolean;
}

/**
 * What ZMQ connects and binds to. Names are looked up here, IPv4 first: ZMQ would do it in its own thread, again and again, and not say
 * that a name does not exist. Errors: those of the lookup.
 */
export async function zmqEndpoint(host: string, port: number | "*"): Promise<ZmqEndpoint> {
  if (host === "*") return { url: `tcp://*:${port}`, ipv6: false };
  const { address, family } =
    isIP(host) === 0 ? await lookup(host, { verbatim: false }) : { address: host, family: isIP(host) };
  const ipv6 = family === 6;
  return { url: `tcp://${ipv6 ? `[${address}]` : address}:${port}`, ipv6 };
}

/** The same bytes as a Buffer, which ZMQ takes; nothing is copied. */
export function asBuffer(frame: Uint8Array): Buffer {
  return Buffer.from(frame.buffer, frame.byteOffset, frame.byteLength);
}

/** The text of a thrown value. */
export function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
