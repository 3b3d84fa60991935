import { lookup } from "node:dns/promises";
import { isIP } from "node:net";

export interface ZmqEndpoint {
  readonly url: string;
  readonly ipv6: boolean;
}

/**
 * The endpoint that ZMQ connects or binds to. Host names are resolved here, IPv4 first: ZMQ would resolve them in its own thread, retry
 * forever, and never report that a name does not exist. Errors: those of the lookup.
 */
export async function zmqEndpoint(host: string, port: number | "*"): Promise<ZmqEndpoint> {
  if (host === "*") return { url: `tcp://*:${port}`, ipv6: false };
  const { address, family } =
    isIP(host) === 0 ? await lookup(host, { verbatim: false }) : { address: host, family: isIP(host) };
  const ipv6 = family === 6;
  return { url: `tcp://${ipv6 ? `[${address}]` : address}:${port}`, ipv6 };
}

/** The same bytes as a Buffer, the type that ZMQ accepts; nothing is copied. */
export function asBuffer(frame: Uint8Array): Buffer {
  return Buffer.from(frame.buffer, frame.byteOffset, frame.byteLength);
}

/** The text of a thrown value. */
export function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
