import { type AddressInfo, connect, createServer, type Socket } from "node:net";

/**
 * A TCP relay in front of a server. It records requests and can cut a response at a chosen place.
 */
export interface HttpTap {
  readonly url: string;
  /** The head of each POST request in lower case: request line and headers. */
  readonly heads: readonly string[];
  close(): Promise<void>;
}

/**
 * `cutAt` receives all that the server has sent on a connection so far. It returns the offset at
 * which the connection breaks, or undefined to pass everything on.
 */
export async function startHttpTap(
  targetUrl: string,
  cutAt: (answered: string) => number | undefined = () => undefined,
): Promise<HttpTap> {
  const heads: string[] = [];
  const sockets = new Set<Socket>();
  const { hostname, port } = new URL(targetUrl);
  const server = createServer((client) => {
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
      upstream.write(bytes);
    });
    upstream.on("data", (bytes) => {
      answered += bytes.toString("latin1");
      const end = cutAt(answered);
      const passes = Buffer.from(answered.slice(passed, end), "latin1");
      passed += passes.length;
      // Ends the connection after these bytes, so that the client still receives them.
      if (end === undefined) client.write(passes);
      else client.end(passes, () => upstream.destroy());
    });
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    heads,
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      for (const socket of sockets) socket.destroy();
      await closed;
    },
  };
}
