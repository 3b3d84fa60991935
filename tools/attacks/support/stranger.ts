import { connect, type Socket } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";

/** The attacker's address: limits per address must not hit the honest. */
const ADDRESS = "127.0.0.66";

/** A connection of the attacker. Errors are part of the attack. */
export function stranger(host: string, port: number, text: string | Buffer = ""): Promise<Socket> {
  const socket = connect({ host, port, localAddress: host === "127.0.0.1" ? ADDRESS : undefined });
  return new Promise((resolve) => {
    socket.on("error", () => resolve(socket));
    socket.once("close", () => resolve(socket));
    socket.once("connect", () => {
      if (text.length > 0) socket.write(text);
      resolve(socket);
    });
  });
}

/** The same, to the server of a URL. */
export function strangerAt(url: string, text: string | Buffer = ""): Promise<Socket> {
  const { hostname, port } = new URL(url);
  return stranger(hostname, Number(port), text);
}

/** Many connections of the attacker that send the same. */
export async function strangers(
  count: number,
  host: string,
  port: number,
  text: string | Buffer,
): Promise<Socket[]> {
  const sockets: Socket[] = [];
  for (let from = 0; from < count; from += 200) {
    const batch = Array.from({ length: Math.min(200, count - from) }, () =>
      stranger(host, port, text),
    );
    sockets.push(...(await Promise.all(batch)));
  }
  return sockets;
}

/** Waits; ends early when the signal aborts. */
export async function pause(ms: number, signal?: AbortSignal): Promise<void> {
  await sleep(ms, undefined, signal === undefined ? {} : { signal }).catch(() => {});
}
