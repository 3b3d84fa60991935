import { type Agent, KvError, type Transport } from "@kv/interface";
import { createLoopbackAgent, type Fabric } from "./agent.js";
import { allocate } from "./memory.js";

const fabric: Fabric = new Map();

export function loopbackTransport(): Transport {
  const agents = new Set<Agent>();
  let closed = false;
  return {
    name: "loopback",
    capabilities: {
      read: true,
      write: true,
      notifications: true,
      crossProcess: false,
      memoryTypes: ["DRAM"],
      reportsPeerDeath: false,
    },
    async createAgent({ name = globalThis.crypto.randomUUID(), backends = [] } = {}) {
      if (closed) throw new KvError("KV_TRANSPORT_CLOSED", "the loopback transport is closed");
      if (!/^[\x20-\x7e]{1,255}$/.test(name)) {
        throw new KvError(
          "KV_AGENT_INVALID",
          `${JSON.stringify(name)} is not 1 to 255 printable ASCII characters`,
        );
      }
      if (fabric.has(name))
        throw new KvError("KV_AGENT_INVALID", `an agent ${name} already exists`);
      const unknown = backends.find((backend) => backend.name !== "LOOPBACK");
      if (unknown !== undefined)
        throw new KvError("KV_BACKEND_UNAVAILABLE", `loopback has no backend ${unknown.name}`);
      const agent = createLoopbackAgent(name, fabric);
      agents.add(agent);
      return agent;
    },
    allocate(lengthBytes, { memoryType = "DRAM" } = {}) {
      if (memoryType === "DRAM") return allocate(lengthBytes);
      throw new KvError("KV_TRANSPORT_UNSUPPORTED", `memory type ${memoryType}: loopback has DRAM`);
    },
    async close() {
      closed = true;
      await Promise.all([...agents].map((agent) => agent.close()));
    },
  };
}

export default loopbackTransport;
