import { once } from "node:events";
import { connect } from "node:net";

export type RawClient = Awaited<ReturnType<typeof rawClient>>;

/** `from` is an address of the loopback. */
export async function rawClient(url: string, text = "", from?: string) {
  const { hostname, port } = new URL(url);
  let received = "";
  const socket = connect({ host: hostname, port: Number(port), localAddress: from });
  socket.setEncoding("latin1").on("data", (chunk: string) => {
    received += chunk;
  });
  const closed = new Promise<string>((resolve) => {
    socket.on("error", () => {}).once("close", () => resolve(received));
  });
  await once(socket, "connect");
  socket.write(text);
  return { socket, received: () => received, closed };
}

/** `headers` are lines that end with CRLF. */
export function postText(body: string, headers = "", path = "/v1/completions"): string {
  const length = headers.includes("transfer-encoding")
    ? ""
    : `content-length: ${Buffer.byteLength(body)}\r\n`;
  return `POST ${path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n${length}${headers}\r\n${body}`;
}
