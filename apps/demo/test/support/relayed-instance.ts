import { type AddressInfo, connect, createServer, type Socket } from "node:net";
import type { MemoryNetwork } from "@kv/transport-memory";
import type { PlannedInstance } from "../../src/cluster/cluster-plan.js";
import type { Instance } from "../../src/instance/instance.js";
import { startInMemory } from "./memory-pair.js";

/**
 * An instance of this process behind a relay, which keeps its address: it ends, and starts again.
 */
export interface RelayedInstance {
  readonly name: string;
  readonly url: string;
  start(): Promise<void>;
  /** Ends it as by SIGKILL; with SIGTERM it drains first. */
  kill(signal?: "SIGKILL" | "SIGTERM"): Promise<void>;
  /** Ends the instance and the relay. */
  end(): Promise<void>;
}

/** Starts an instance on a memory network, as the host of its name. */
export async function startRelayed(
  { name, config }: PlannedInstance,
  network: MemoryNetwork,
): Promise<RelayedInstance> {
  const sockets = new Set<Socket>();
  let port: number | undefined;
  let instance: Instance | undefined;
  const relay = createServer((client) => {
    if (port === undefined) return void client.destroy();
    const server = connect(port, "127.0.0.1");
    for (const socket of [client, server]) {
      sockets.add(socket);
      socket.on("error", () => {});
      socket.on("close", () => {
        sockets.delete(socket);
        client.destroy();
        server.destroy();
      });
    }
    client.pipe(server).pipe(client);
  });
  await new Promise<void>((resolve) => relay.listen(0, "127.0.0.1", resolve));
  const relayed: RelayedInstance = {
    name,
    url: `http://127.0.0.1:${(relay.address() as AddressInfo).port}`,
    async start() {
      instance = await startInMemory(name, config, network);
      port = instance.port;
    },
    async kill(signal = "SIGKILL") {
      if (signal === "SIGTERM") await instance?.drain();
      port = undefined;
      network.host(name).kill();
      for (const socket of sockets) socket.destroy();
      await instance?.close();
    },
    async end() {
      for (const socket of sockets) socket.destroy();
      await instance?.close();
      await new Promise((resolve) => relay.close(resolve));
    },
  };
  await relayed.start();
  return relayed;
}
