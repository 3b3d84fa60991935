import { createServer, type Server, type Socket } from "node:net";
import { KvError, type SideChannelListener } from "@kv/interface";
import type { CurveKeySource } from "../keys.js";
import { reasonOf, resolveHost } from "../zmq-endpoint.js";
import type { Answer, ConnectionTable } from "./connection-table.js";

/** Where a ROUTER is bound, and what takes its messages. */
export interface ListenOptions {
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  readonly answer: Answer;
}

/**
 * Answers requests on a port as a ROUTER; with `curve`, over CURVE only.
 *
 * @throws `KV_SIDE_CHANNEL_BIND_FAILED`.
 */
export async function openZmqListener(
  { host, port, answer }: ListenOptions,
  table: ConnectionTable,
  curve: CurveKeySource,
): Promise<SideChannelListener> {
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("close", () => sockets.delete(socket));
    table.admit(socket, answer, curve);
  });
  await bind(server, host, port);
  const closed = new Promise<void>((resolve) => server.on("close", resolve));
  // An accept that fails, as for lack of descriptors, is tried again.
  server.on("error", (error) =>
    table.warnings.warn("side-channel-accept-failed", "accept", { error }),
  );
  const address = server.address();
  return {
    host,
    port: typeof address === "object" && address !== null ? address.port : port,
    async close() {
      server.close();
      for (const socket of sockets) socket.destroy();
      await closed;
    },
  };
}

async function bind(server: Server, host: string, port: number): Promise<void> {
  try {
    const address = await resolveHost(host);
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen({ host: address, port, exclusive: true }, () => {
        server.off("error", reject);
        resolve();
      });
    });
  } catch (error) {
    throw new KvError(
      "KV_SIDE_CHANNEL_BIND_FAILED",
      `side channel: ${host}:${port} cannot be bound: ${reasonOf(error)}`,
      { hint: bindHint(error, host, port), details: { host, port }, cause: error },
    );
  }
}

function bindHint(error: unknown, host: string, port: number): string {
  const code = (error as { code?: unknown } | undefined)?.code;
  if (code === "EADDRINUSE")
    return `another engine has port ${port}: give each engine of a host its own VLLM_NIXL_SIDE_CHANNEL_PORT, or end the one that has it`;
  if (code === "EACCES")
    return "ports below 1024 are reserved: set VLLM_NIXL_SIDE_CHANNEL_PORT to a higher one";
  return `${host} must be a name or an address of this host: set VLLM_NIXL_SIDE_CHANNEL_HOST`;
}
