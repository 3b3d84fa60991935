import { connect, type Socket } from "node:net";
import type { Endpoint } from "@kv/fleet/front-end";

/** An answer as the client got it. */
export interface Received {
  readonly status: number;
  /** Names in lower case. */
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string;
}

/**
 * A client of one connection, with one request at a time. It takes a tenth of the time of `fetch`.
 */
export class KeptClient {
  readonly #socket: Socket;
  readonly #host: string;
  #received = Buffer.alloc(0);
  #changed = () => {};
  #closed = false;

  constructor(url: string) {
    const { hostname, port, host } = new URL(url);
    this.#host = host;
    this.#socket = connect({ host: hostname, port: Number(port), noDelay: true });
    this.#socket.on("error", () => {});
    this.#socket.on("data", (chunk) => {
      this.#received = Buffer.concat([this.#received, chunk]);
      this.#changed();
    });
    this.#socket.on("close", () => {
      this.#closed = true;
      this.#changed();
    });
  }

  /** Posts a body. Rejects when the connection closes before the end of the answer. */
  async post(
    endpoint: Endpoint,
    body: unknown,
    headers: Readonly<Record<string, string>> = {},
  ): Promise<Received> {
    const text = JSON.stringify(body);
    const head = { host: this.#host, "content-type": "application/json", ...headers };
    const lines = Object.entries(head).map(([name, value]) => `${name}: ${value}\r\n`);
    const length = `content-length: ${Buffer.byteLength(text)}\r\n`;
    this.#socket.write(`POST ${endpoint} HTTP/1.1\r\n${lines.join("")}${length}\r\n${text}`);
    for (;;) {
      const answer = parsed(this.#received);
      if (answer !== undefined) {
        this.#received = Buffer.alloc(0);
        return answer;
      }
      if (this.#closed)
        throw new Error(`the connection closed after ${JSON.stringify(this.#received.toString())}`);
      await new Promise<void>((resolve) => {
        this.#changed = resolve;
      });
    }
  }

  close(): void {
    this.#socket.destroy();
  }
}

/** A whole answer; undefined where the end is missing. */
function parsed(bytes: Buffer): Received | undefined {
  const headEnd = bytes.indexOf("\r\n\r\n");
  if (headEnd === -1) return undefined;
  const [first = "", ...lines] = bytes.toString("latin1", 0, headEnd).split("\r\n");
  const headers = Object.fromEntries(
    lines.map((line) => [
      line.slice(0, line.indexOf(":")).toLowerCase(),
      line.slice(line.indexOf(":") + 1).trim(),
    ]),
  );
  const status = Number(first.split(" ")[1]);
  const rest = bytes.subarray(headEnd + 4);
  const body =
    headers["content-length"] === undefined
      ? unchunked(rest)
      : withLength(rest, Number(headers["content-length"]));
  return body === undefined ? undefined : { status, headers, body: body.toString() };
}

function withLength(bytes: Buffer, length: number): Buffer | undefined {
  return bytes.length < length ? undefined : bytes.subarray(0, length);
}

function unchunked(bytes: Buffer): Buffer | undefined {
  const chunks: Buffer[] = [];
  for (let at = 0; ; ) {
    const lineEnd = bytes.indexOf("\r\n", at);
    if (lineEnd === -1) return undefined;
    const length = Number.parseInt(bytes.toString("latin1", at, lineEnd), 16);
    const end = lineEnd + 2 + length;
    if (bytes.length < end + 2) return undefined;
    if (length === 0) return Buffer.concat(chunks);
    chunks.push(bytes.subarray(lineEnd + 2, end));
    at = end + 2;
  }
}
