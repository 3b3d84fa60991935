import { connect, type Socket } from "node:net";

const open = new Set<Socket>();

export function stranger(
  port: number,
  text: string | Buffer = "",
  localAddress?: string,
): Promise<Socket> {
  const socket = connect({ host: "127.0.0.1", port, localAddress });
  open.add(socket);

  return new Promise((resolve) => {
    socket.on("error", () => {}).once("close", () => resolve(socket));
    socket.once("connect", () => {
      if (text.length > 0) socket.write(text);
      resolve(socket);
    });
  });
}

export async function strangers(
  count: number,
  port: number,
  text: string | Buffer,
  localAddress?: string,
): Promise<Socket[]> {
  const sockets: Socket[] = [];
  for (let left = count; left > 0; left -= 200) {
    const batch = Array.from({ length: Math.min(200, left) }, () =>
      stranger(port, text, localAddress),
    );
    sockets.push(...(await Promise.all(batch)));
  }
  return sockets;
}

export function leave(): void {
  for (const socket of open) socket.destroy();
  open.clear();
}

export const portOf = (url: string): number => Number(new URL(url).port);

/** With `lengthBytes` the body may be longer than `body`. */
export function postText(body: string, lengthBytes = Buffer.byteLength(body)): string {
  return `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ${lengthBytes}\r\n\r\n${body}`;
}
