import { connect, createServer, type Socket } from "node:net";
import { listening } from "@kv/testing/http/listening";

export interface HttpTapOptions {
  /** Gets all that was sent on a connection so far. Returns where it breaks. */
  readonly cutAt?: ((answered: string) => number | undefined) | undefined;
  readonly header?: string;
}

/** A TCP relay that records requests. Either side's end ends the other side. */
export async function startHttpTap(
  targetUrl: string,
  { cutAt = () => undefined, header }: HttpTapOptions = {},
) {
  const heads: string[] = [];
  const sockets = new Set<Socket>();
  const { hostname, port } = new URL(targetUrl);
  let isCut = false;
  const server = createServer((client) => {
    if (isCut) return client.destroy();
    const upstream = connect(Number(port), hostname);
    let [answered, passed] = ["", 0];
    for (const socket of [client, upstream]) {
      sockets.add(socket);
      socket.on("error", () => {});
      socket.on("close", () => {
        sockets.delete(socket);
        client.destroy();
        upstream.destroy();
      });
    }
    client.on("data", (bytes) => {
      const text = bytes.toString("latin1");
      if (text.startsWith("POST "))
        heads.push(text.slice(0, text.indexOf("\r\n\r\n")).toLowerCase());
      const [request] = header === undefined ? [] : (/^[A-Z]+ \S+ HTTP\/1\.1\r\n/.exec(text) ?? []);
      if (request !== undefined) upstream.write(`${request}${header}\r\n`);
      upstream.write(bytes.subarray(request?.length ?? 0));
    });
    upstream.on("data", (bytes) => {
      answered += bytes.toString("latin1");
      const end = cutAt(answered);
      const passes = Buffer.from(answered.slice(passed, end), "latin1");
      passed += passes.length;
      // The client still receives these bytes.
      if (end === undefined) client.write(passes);
      else client.end(passes, () => upstream.destroy());
    });
  });
  const drop = () => {
    for (const socket of sockets) socket.destroy();
  };
  return {
    url: `http://127.0.0.1:${await listening(server)}`,
    heads: heads as readonly string[],
    /** Ends connections, and closes new ones at once until `mend`. */
    cut() {
      isCut = true;
      drop();
    },
    mend() {
      isCut = false;
    },
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      drop();
      await closed;
    },
  };
}
