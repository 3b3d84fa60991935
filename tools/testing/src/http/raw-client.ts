import { connect, type Socket } from "node:net";

export interface RawClient {
  readonly socket: Socket;
  received(): string;
  /** All bytes that came, when the connection has ended. */
  readonly closed: Promise<string>;
}

/** Connects to a URL's host and port; `from` is an address of the loopback. */
export function rawClient(url: string, text = "", from?: string): Promise<RawClient> {
  const { hostname, port } = new URL(url);
  let received = "";
  const socket = connect({
    host: hostname,
    port: Number(port),
    ...(from ? { localAddress: from } : {}),
  });
  socket.setEncoding("latin1").on("data", (chunk: string) => {
    received += chunk;
  });
  const closed = new Promise<string>((resolve) => {
    socket.on("error", () => {});
    socket.once("close", () => resolve(received));
  });
  return new Promise((resolve, reject) => {
    socket.once("error", reject);
    socket.once("connect", () => {
      socket.write(text);
      resolve({ socket, received: () => received, closed });
    });
  });
}

/** The text of a POST; `headers` are lines that end with CRLF. */
export function postText(body: string, headers = "", path = "/v1/completions"): string {
  const length = headers.includes("transfer-encoding")
    ? ""
    : `content-length: ${Buffer.byteLength(body)}\r\n`;
  return `POST ${path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n${length}${headers}\r\n${body}`;
}
