import { once } from "node:events";
import { type AddressInfo, createServer, type Server } from "node:net";

/** Listens on the loopback, with room for many connections at once. Returns the port. */
export async function listening(server: Server, port = 0): Promise<number> {
  await once(server.listen(port, "127.0.0.1", 4096), "listening");
  return (server.address() as AddressInfo).port;
}

export async function freePort(): Promise<number> {
  const server = createServer();
  const port = await listening(server);
  await once(server.close(), "close");
  return port;
}
